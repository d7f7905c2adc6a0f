"""Published data files: reading their records, and writing lines that this system reads.

For scripts that turn a data set into task files and corpora (`examples/*/prepare.py`,
`examples/multihop_qa/convert.py`). A record that does not fit is an error with its place.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from agent_r1.runtime.files.file_formats import not_utf8
from agent_r1.runtime.files.writing import replace_file

Record = TypeVar("Record", bound=BaseModel)


class SourceError(ValueError):
    """A source file that cannot be converted; the text names file, line and record."""


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, record) of a JSON array or of JSON lines, plain or gzip-compressed.

    Raises:
        SourceError: the file is missing, damaged, empty, or holds something else.
    """
    text = _read_text(path)
    start = _skip_blanks(text, 0)
    if start == len(text):
        raise SourceError(f"{path}:1: the file is empty")
    place = None
    pairs = _array_items(path, text, start + 1) if text[start] == "[" else _lines(path, text)
    for place, value in pairs:
        if not isinstance(value, dict):
            raise SourceError(f"{place}: a record must be a JSON object; it is {value!r:.80}")
        yield place, value
    if place is None:
        raise SourceError(f"{path}:1: the array holds no record")


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except FileNotFoundError as exc:
        raise SourceError(f"{path} does not exist") from exc
    except UnicodeDecodeError as exc:
        raise SourceError(f"{path}: {not_utf8(exc)}") from exc
    except (OSError, EOFError, zlib.error) as exc:
        raise SourceError(f"{path}: cannot be read ({exc}); copy it again") from exc


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        place = f"{path}:{number}"
        if not line.strip():
            raise SourceError(f"{place}: the line is empty; remove it")
        try:
            yield place, json.loads(line)
        except json.JSONDecodeError as exc:
            raise SourceError(f"{place}: not JSON: {exc.msg} at column {exc.colno}") from exc


def _array_items(path: Path, text: str, position: int) -> Iterator[tuple[str, Any]]:
    """Decode a JSON array item by item: published files are too large to hold decoded."""
    decoder = json.JSONDecoder()
    line, counted, number = 1, 0, 0
    position = _skip_blanks(text, position)
    while text[position : position + 1] != "]":
        number += 1
        line += text.count("\n", counted, position)
        counted = position
        place = f"{path}:{line} (record {number})"
        try:
            value, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as exc:
            raise SourceError(
                f"{path}:{exc.lineno} (record {number}): not JSON: {exc.msg} at column {exc.colno}"
            ) from exc
        yield place, value
        position = _skip_blanks(text, end)
        if text[position : position + 1] == ",":
            position = _skip_blanks(text, position + 1)
        elif text[position : position + 1] != "]":
            raise SourceError(f"{place}: the array is not closed after it; the file is cut off")


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def parse_record(record_type: type[Record], place: str, values: dict[str, Any]) -> Record:
    """Return a record as a message of `record_type`.

    Raises:
        SourceError: it is none; place, field and value are named.
    """
    try:
        return record_type.model_validate(values)
    except ValidationError as exc:
        raise misfit(place, exc) from exc


def misfit(place: str, exc: ValidationError) -> SourceError:
    """Return what pydantic refused as an error that names the place."""
    first = exc.errors()[0]
    where = ".".join(map(str, first["loc"])) or "record"
    return SourceError(
        f"{place}: {where}: {first['msg']} (got {first['input']!r:.80}); is this the data set that "
        "the command names, in a file with answers?"
    )


def write_lines(path: Path, messages: Iterable[BaseModel]) -> int:
    """Write one message a line, the whole file or none of it; return their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with replace_file(path) as file:
        for message in messages:
            file.write(message.model_dump_json(exclude_defaults=True).encode() + b"\n")
            count += 1
    return count
