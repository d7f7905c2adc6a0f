"""The search corpus: JSON lines of {id, title, text}, plain or gzip-compressed.

Read by the index builders in `backends/`.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from agent_r1_proto.messages import StrictMessage

_SHOWN_CHARS = 80


class Passage(StrictMessage):
    """One passage of a corpus: one line of the file."""

    id: str
    title: str
    text: str


def read_passages(path: Path) -> Iterator[Passage]:
    """Yield the passages of a corpus file, in order.

    Raises:
        ValueError: the file is missing, empty, or has a malformed line (named by number).
    """
    if not path.is_file():
        raise ValueError(
            f"corpus {str(path)!r} does not exist or is not a file; set corpus to a JSON lines "
            "file of {id, title, text}"
        )
    line_number = 0
    try:
        with _open(path) as lines:
            for line_number, line in enumerate(lines, start=1):
                yield _parse(path, line_number, line)
    except (EOFError, OSError, zlib.error) as exc:
        raise ValueError(
            f"{path}:{line_number + 1}: cannot be read further ({exc}); check that the file is "
            "readable and whole"
        ) from exc
    if line_number == 0:
        raise ValueError(f"corpus {str(path)!r} is empty; it needs one passage a line")


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    return path.open("rb")


def _parse(path: Path, line_number: int, line: bytes) -> Passage:
    if not line.strip():
        raise ValueError(
            f'{path}:{line_number}: the line is empty; it must be {{"id", "title", "text"}}'
        )
    try:
        return Passage.model_validate_json(line)
    except ValidationError as exc:
        error = exc.errors()[0]
        where = ".".join(str(part) for part in error["loc"])
        shown = line.decode(errors="replace").strip()[:_SHOWN_CHARS]
        raise ValueError(
            f"{path}:{line_number}: {where + ': ' if where else ''}{error['msg']}; a line must be "
            f'{{"id": text, "title": text, "text": text}} and is {shown!r}'
        ) from exc
