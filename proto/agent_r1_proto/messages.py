"""Base of all messages: strictness, and the encoding of stream entries.

Every service reads and writes stream entries through `encode_entry` and `decode_entry`. An entry
has the fields `schema` ("trajectory/2.0"), `key`, `meta` (the message as JSON without its arrays)
`lengths` and `widths` (values per array, bytes per value), where sequences begin alike `repeats`
(prefixes.py), and one bytes field per array, named `array:<field>` (arrays.py). No pickle, no JSON
lists of numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from agent_r1_proto.arrays import Array, ArrayKind, SentOnce, SentWhere
from agent_r1_proto.prefixes import Repeats, find_repeats, leave_out, put_back

ARRAY_FIELD_PREFIX = "array:"


class Message(BaseModel):
    """A message between services: frozen; fields of a newer minor schema are ignored."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class StrictMessage(Message):
    """A message that users write (data files, HTTP bodies): an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")


class StreamMessage(Message):
    """A message with a schema name and version, so that it can be a stream entry.

    Subclasses set `SCHEMA_NAME` and `SCHEMA_VERSION` ("major.minor"): a new optional field raises
    the minor, anything a reader of the old version would misread raises the major.
    """

    SCHEMA_NAME: ClassVar[str]
    SCHEMA_VERSION: ClassVar[str]
    OLDEST_MAJOR: ClassVar[int] = 1
    """The oldest major version that this class still reads."""

    def stream_key(self) -> str:
        """Return the key of the entry: what the message is about, for logs and dead letters."""
        raise TypeError(f"{type(self).__name__} has no stream key")

    def written_version(self) -> str:
        """Return the version that this message is written as: the oldest that says all of it."""
        return self.SCHEMA_VERSION

    def replace(self, **changes: object) -> Self:
        """Return a copy with the given fields changed, validated again."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**values, **changes})


class EntryError(ValueError):
    """A stream entry that this reader can never use: malformed, or of an older major schema."""


class NewerSchemaError(Exception):
    """A stream entry of a newer major schema: this reader must be upgraded; leave it pending."""


@dataclass(frozen=True)
class ArrayField:
    """One array of a message, `outer.inner` where it is a nested message's."""

    path: str
    kind: ArrayKind
    mask: str | None
    """Path of the mask where its other values are 0; None: all are sent."""
    starts: str | None
    """Path of where its sequences begin, which send once what they begin with alike."""
    entry_field: bytes

    def repeats(self, message: StreamMessage) -> Repeats:
        """Return what its sequences begin with alike; [] where none do."""
        if self.starts is None:
            return []
        found = find_repeats(_at(message, self.path), _at(message, self.starts))
        return found if any(shared for shared, _ in found) else []

    def of(self, message: StreamMessage, repeats: Repeats) -> Array:
        """Return the values that are sent."""
        array = _at(message, self.path)
        if repeats and self.starts is not None:
            return leave_out(array, _at(message, self.starts), repeats)
        return array if self.mask is None else array[_at(message, self.mask)]


@dataclass(frozen=True)
class Layout:
    """The arrays of one message class, and what `meta` leaves out for them."""

    arrays: tuple[ArrayField, ...]
    left_out: dict[str, Any]


def _at(message: StreamMessage, path: str) -> Any:
    value: Any = message
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _array_fields(cls: type[StreamMessage], prefix: str = "") -> Iterable[ArrayField]:
    for name, field in cls.model_fields.items():
        path = prefix + name
        kind = next((one for one in field.metadata if isinstance(one, ArrayKind)), None)
        sent = next((one for one in field.metadata if isinstance(one, SentWhere)), None)
        if kind is not None:
            once = next((one for one in field.metadata if isinstance(one, SentOnce)), None)
            mask = prefix + sent.mask if sent else None
            starts = prefix + once.starts if once else None
            yield ArrayField(path, kind, mask, starts, (ARRAY_FIELD_PREFIX + path).encode())
        elif isinstance(field.annotation, type) and issubclass(field.annotation, StreamMessage):
            yield from _array_fields(field.annotation, f"{path}.")


@cache
def layout_of(cls: type[StreamMessage]) -> Layout:
    """Return where the arrays of a message class are; masks come before what they mask."""
    arrays = sorted(_array_fields(cls), key=lambda array: array.mask is not None)
    left_out: dict[str, Any] = {}
    for array in arrays:
        *outer, last = array.path.split(".")
        level = left_out
        for name in outer:
            level = level.setdefault(name, {})
        level[last] = True
    return Layout(tuple(arrays), left_out)


def encode_entry(message: StreamMessage) -> dict[bytes, bytes]:
    """Encode a message as the fields of one stream entry."""
    layout = layout_of(type(message))
    fields = {
        b"schema": f"{message.SCHEMA_NAME}/{message.written_version()}".encode(),
        b"key": message.stream_key().encode(),
        b"meta": message.model_dump_json(exclude=layout.left_out).encode(),
    }
    lengths: dict[str, int] = {}
    widths: dict[str, int] = {}
    repeats: dict[str, Repeats] = {}
    for array in layout.arrays:
        if found := array.repeats(message):
            repeats[array.path] = found
        values = array.of(message, found)
        width = array.kind.width(values)
        lengths[array.path], widths[array.path] = len(values), width
        fields[array.entry_field] = array.kind.to_bytes(values, width)
    if layout.arrays:
        fields |= {b"lengths": json.dumps(lengths).encode(), b"widths": json.dumps(widths).encode()}
    if repeats:
        fields[b"repeats"] = json.dumps(repeats, separators=(",", ":")).encode()
    return fields


M = TypeVar("M", bound=StreamMessage)


def _split_schema(raw: bytes | None) -> tuple[str, int, int]:
    if raw is None:
        raise EntryError("stream entry has no field 'schema'")
    try:
        name, version = raw.decode().split("/")
        major, minor = version.split(".")
        return name, int(major), int(minor)
    except (ValueError, UnicodeDecodeError) as exc:
        raise EntryError(f"stream entry has schema {raw!r}; expected name/major.minor") from exc


def _decode_arrays(
    cls: type[StreamMessage], fields: Mapping[bytes, bytes], meta: dict[str, Any]
) -> dict[str, Array]:
    lengths: dict[str, int] = from_json(fields.get(b"lengths", b"{}"))
    widths: dict[str, int] = from_json(fields.get(b"widths", b"{}"))
    repeats: dict[str, Repeats] = from_json(fields.get(b"repeats", b"{}"))
    arrays: dict[str, Array] = {}
    for array in layout_of(cls).arrays:
        raw = fields.get(array.entry_field)
        if raw is None:
            raise EntryError(f"{cls.SCHEMA_NAME} entry lacks the array {array.path!r}")
        width = widths.get(array.path, array.kind.dtype.itemsize)
        values = array.kind.from_bytes(raw, lengths[array.path], width)
        mask = None if array.mask is None else arrays[array.mask]
        if mask is not None and len(values) != len(mask):  # version 1 sent the others' zeros too
            sent, values = values, np.zeros(len(mask), array.kind.dtype)
            values[mask] = sent
        if array.starts is not None and array.path in repeats:
            starts: Any = meta
            for name in array.starts.split("."):
                starts = starts[name]
            values = put_back(values, starts, repeats[array.path])
        arrays[array.path] = values
    return arrays


def decode_entry(cls: type[M], fields: Mapping[bytes, bytes]) -> M:
    """Decode the fields of one stream entry.

    Raises:
        NewerSchemaError: the entry has a newer major version than this reader.
        EntryError: the entry is malformed, of another schema or of an older major version.
    """
    name, major, minor = _split_schema(fields.get(b"schema"))
    own_major = int(cls.SCHEMA_VERSION.split(".")[0])
    if name != cls.SCHEMA_NAME:
        raise EntryError(f"stream entry has schema {name!r}; expected {cls.SCHEMA_NAME!r}")
    if major > own_major:
        raise NewerSchemaError(
            f"{name}/{major}.{minor} is newer than {cls.SCHEMA_VERSION}, the newest this reader "
            "knows; upgrade this service"
        )
    if major < cls.OLDEST_MAJOR:
        raise EntryError(f"{name}/{major}.{minor} is older than {cls.SCHEMA_VERSION}")
    try:
        values: dict[str, Any] = from_json(fields[b"meta"])
        for path, array in _decode_arrays(cls, fields, values).items():
            *outer, last = path.split(".")
            level = values
            for outer_name in outer:
                level = level[outer_name]
            level[last] = array
        # A newer minor may add a field to a message that is strict where users write it.
        return cls.model_validate(values, extra="ignore")
    except EntryError:
        raise
    except (KeyError, ValueError, TypeError, ValidationError) as exc:
        raise EntryError(f"{name} entry does not parse: {exc}") from exc
