"""What all messages share: strictness, numpy array fields, and the stream-entry encoding.

Every service reads and writes stream entries through `encode_entry` and `decode_entry`. An entry
has the fields `schema` ("trajectory/1.0"), `key`, `meta` (the message as JSON without its arrays)
`lengths` (values per array) and one little-endian bytes field per array, named `array:<field>`;
masks are packed eight to a byte. No pickle, no JSON lists of numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
)

ARRAY_FIELD_PREFIX = "array:"


@dataclass(frozen=True)
class ArrayKind:
    """How one array field looks in memory and on the wire.

    `dtype` is the little-endian numpy dtype in memory; a boolean array is bit-packed on the wire.
    """

    dtype: np.dtype[Any]

    def check(self, value: object) -> npt.NDArray[Any]:
        """Return `value` as a read-only one-dimensional array of this dtype.

        Raises:
            ValueError: the value has another dtype kind or more than one dimension.
        """
        array = np.asarray(value)
        if array.ndim != 1:
            raise ValueError(f"array has {array.ndim} dimensions; expected 1 ([T])")
        if array.size == 0:
            array = array.astype(self.dtype)
        if array.dtype != self.dtype:
            same_kind = np.can_cast(array.dtype, self.dtype, casting="same_kind")
            integral = array.dtype.kind in "iu" and self.dtype.kind == "i"
            if not (same_kind or integral):
                raise ValueError(f"array dtype {array.dtype} cannot be stored as {self.dtype}")
            converted = array.astype(self.dtype)
            if integral and not np.array_equal(converted, array):
                raise ValueError(f"array values do not fit {self.dtype}")
            array = converted
        else:
            array = array.copy() if array.flags.writeable else array
        array.setflags(write=False)
        return array

    def to_bytes(self, array: npt.NDArray[Any]) -> bytes:
        """Encode: little-endian values, or bits packed eight to a byte (little bit order)."""
        if self.dtype == np.dtype(np.bool_):
            return np.packbits(array, bitorder="little").tobytes()
        return array.astype(self.dtype.newbyteorder("<"), copy=False).tobytes()

    def from_bytes(self, data: bytes, length: int) -> npt.NDArray[Any]:
        """Decode `length` values.

        Raises:
            ValueError: the number of bytes does not fit `length` values.
        """
        is_mask = self.dtype == np.dtype(np.bool_)
        expected = (length + 7) // 8 if is_mask else length * self.dtype.itemsize
        if len(data) != expected:
            raise ValueError(
                f"array field has {len(data)} bytes; {length} values need {expected} bytes"
            )
        if is_mask:
            packed = np.frombuffer(data, dtype=np.uint8)
            return np.unpackbits(packed, count=length, bitorder="little").astype(np.bool_)
        return np.frombuffer(data, dtype=self.dtype.newbyteorder("<")).astype(self.dtype)


INT32 = ArrayKind(np.dtype(np.int32))
FLOAT32 = ArrayKind(np.dtype(np.float32))
BOOL = ArrayKind(np.dtype(np.bool_))


def _array_to_list(array: npt.NDArray[Any]) -> list[Any]:
    return array.tolist()


Int32Array = Annotated[
    npt.NDArray[np.int32],
    BeforeValidator(INT32.check),
    PlainSerializer(_array_to_list, when_used="json"),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}, "x-wire": "int32 bytes"}),
    INT32,
]
Float32Array = Annotated[
    npt.NDArray[np.float32],
    BeforeValidator(FLOAT32.check),
    PlainSerializer(_array_to_list, when_used="json"),
    WithJsonSchema({"type": "array", "items": {"type": "number"}, "x-wire": "float32 bytes"}),
    FLOAT32,
]
BoolArray = Annotated[
    npt.NDArray[np.bool_],
    BeforeValidator(BOOL.check),
    PlainSerializer(_array_to_list, when_used="json"),
    WithJsonSchema({"type": "array", "items": {"type": "boolean"}, "x-wire": "packed bits"}),
    BOOL,
]


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

    @classmethod
    def array_kinds(cls) -> dict[str, ArrayKind]:
        """Return the array fields of this message, nested ones as `outer.inner`."""
        kinds: dict[str, ArrayKind] = {}
        for name, field in cls.model_fields.items():
            for item in field.metadata:
                if isinstance(item, ArrayKind):
                    kinds[name] = item
            nested = field.annotation
            if isinstance(nested, type) and issubclass(nested, StreamMessage):
                kinds |= {f"{name}.{inner}": kind for inner, kind in nested.array_kinds().items()}
        return kinds

    def stream_key(self) -> str:
        """Return the key of the entry: what the message is about, for logs and dead letters."""
        raise TypeError(f"{type(self).__name__} has no stream key")

    def replace(self, **changes: object) -> Self:
        """Return a copy with the given fields changed, validated again."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**values, **changes})


class EntryError(ValueError):
    """A stream entry that this reader can never use: malformed, or of an older major schema."""


class NewerSchemaError(Exception):
    """A stream entry of a newer major schema: this reader must be upgraded; leave it pending."""


def _array_at(message: StreamMessage, path: str) -> npt.NDArray[Any]:
    value: Any = message
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _nested(paths: Iterable[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path in paths:
        *outer, last = path.split(".")
        level = tree
        for name in outer:
            level = level.setdefault(name, {})
        level[last] = True
    return tree


def encode_entry(message: StreamMessage) -> dict[bytes, bytes]:
    """Encode a message as the fields of one stream entry."""
    kinds = message.array_kinds()
    arrays = {path: _array_at(message, path) for path in kinds}
    fields = {
        b"schema": f"{message.SCHEMA_NAME}/{message.SCHEMA_VERSION}".encode(),
        b"key": message.stream_key().encode(),
        b"meta": message.model_dump_json(exclude=_nested(kinds)).encode(),
    }
    if kinds:
        lengths = {path: len(array) for path, array in arrays.items()}
        fields[b"lengths"] = json.dumps(lengths).encode()
    for path, kind in kinds.items():
        fields[(ARRAY_FIELD_PREFIX + path).encode()] = kind.to_bytes(arrays[path])
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
    if major < own_major:
        raise EntryError(f"{name}/{major}.{minor} is older than {cls.SCHEMA_VERSION}")
    try:
        values: dict[str, Any] = json.loads(fields[b"meta"])
        lengths: dict[str, int] = json.loads(fields.get(b"lengths", b"{}"))
        for path, kind in cls.array_kinds().items():
            raw = fields.get((ARRAY_FIELD_PREFIX + path).encode())
            if raw is None:
                raise EntryError(f"{name} entry lacks the array {path!r}")
            *outer, last = path.split(".")
            level = values
            for outer_name in outer:
                level = level[outer_name]
            level[last] = kind.from_bytes(raw, lengths[path])
        # A newer minor may add a field to a message that is strict where users write it.
        return cls.model_validate(values, extra="ignore")
    except EntryError:
        raise
    except (KeyError, ValueError, TypeError, ValidationError) as exc:
        raise EntryError(f"{name} entry does not parse: {exc}") from exc
