"""The search corpus: JSON lines of {id, title, text}, plain or gzip-compressed.

Read by the index builders in `backends/`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from agent_r1_proto.messages import StrictMessage

ENGLISH_STOP_WORDS = (
    *("a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is"),
    *("it", "no", "not", "of", "on", "or", "such", "that", "the", "their", "then", "there"),
    *("these", "they", "this", "to", "was", "will", "with"),
)
"""The 33 words Lucene's (and so Elasticsearch's) `english` analyzer drops."""
_SHOWN_CHARS = 80
_HASH_CHUNK_BYTES = 1 << 20


class Passage(StrictMessage):
    """One passage of a corpus: one line of the file."""

    id: str
    title: str
    text: str


def read_passages(path: Path, *, skip: int = 0) -> Iterator[Passage]:
    """Yield the passages of a corpus file, in order.

    Args:
        path: the file.
        skip: leave out so many lines at its beginning, unread.

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
                if line_number > skip:
                    yield _parse(path, line_number, line)
    except (EOFError, OSError, zlib.error) as exc:
        raise ValueError(
            f"{path}:{line_number + 1}: cannot be read further ({exc}); check that the file is "
            "readable and whole"
        ) from exc
    if line_number == 0:
        raise ValueError(f"corpus {str(path)!r} is empty; it needs one passage a line")


def searched_text(passage: Passage) -> str:
    """Return what a query is compared with: title and text in NFC, as queries are."""
    return unicodedata.normalize("NFC", f"{passage.title}\n{passage.text}")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def hash_of(value: Any) -> str:
    """Return a short hash of a JSON value, as hex."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


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
