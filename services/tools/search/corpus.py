"""The search corpus: JSON lines of {id, title, text}, plain or gzip-compressed.

Read by the index builders beside it.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
import zlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from agent_r1.runtime.files.file_formats import BadLines, check_utf8, first_problem, numbered_lines
from agent_r1_proto.messages import StrictMessage

ENGLISH_STOP_WORDS = (
    *("a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is"),
    *("it", "no", "not", "of", "on", "or", "such", "that", "the", "their", "then", "there"),
    *("these", "they", "this", "to", "was", "will", "with"),
)
"""The 33 words Lucene's (and so Elasticsearch's) `english` analyzer drops."""
_SHOWN_CHARS = 80
_REPORT_EVERY_LINES = 1000


class Passage(StrictMessage):
    """One passage of a corpus: one line of the file."""

    id: str
    title: str
    text: str


def read_passages(path: Path, *, skip: int = 0) -> Iterator[Passage]:
    """Yield the passages of a corpus file, in order; the first `skip` lines are left unread.

    Raises:
        ValueError: the file is missing, empty, or has malformed lines (the first ten are named).
    """
    if not path.is_file():
        raise ValueError(
            f"corpus {str(path)!r} does not exist or is not a file; set corpus to a JSON lines "
            "file of {id, title, text}"
        )
    bad, line_number = BadLines(path), 0
    try:
        for line_number, line in numbered_lines(path):
            if line_number <= skip:
                continue
            try:
                passage = _parse(line, path)
            except ValueError as exc:
                bad.add(f"{path}:{line_number}", exc)
                continue
            if not bad:
                yield passage
    except (EOFError, OSError, zlib.error) as exc:
        raise ValueError(
            f"{path}:{line_number + 1}: cannot be read further ({exc}); check that the file is "
            "readable and whole"
        ) from exc
    if bad:
        raise ValueError(bad.text(line_number))
    if line_number == 0:
        raise ValueError(f"corpus {str(path)!r} is empty; it needs one passage per line")


def survey(
    path: Path,
    report: Callable[[int], None] = lambda _: None,
    check: Callable[[int, Passage], None] = lambda *_: None,
) -> int:
    """Read a whole corpus file: every line is a passage and every id its own.

    Holds 8 bytes a passage in memory, 16 at the end.

    Args:
        path: of the file.
        report: gets the number of passages read so far, now and then.
        check: gets the line and the passage of each line, and may raise a ValueError.

    Returns:
        The number of passages.

    Raises:
        ValueError: as `read_passages`, or an id comes twice; both lines are named.
    """
    hashes = array("Q")
    for line, passage in enumerate(read_passages(path), start=1):
        check(line, passage)
        hashes.append(hash64(passage.id))
        if len(hashes) % _REPORT_EVERY_LINES == 0:
            report(len(hashes))
    ordered = np.sort(np.frombuffer(hashes, dtype=np.uint64))
    repeated = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    line_of: dict[str, int] = {}
    for line, passage in enumerate(read_passages(path) if repeated else (), start=1):
        if hash64(passage.id) in repeated:  # equal hashes need not be equal ids
            first = line_of.setdefault(passage.id, line)
            if first != line:
                raise ValueError(
                    f"{path}:{line}: id {passage.id!r} is also that of line {first}; give every "
                    "passage its own id"
                )
    return len(hashes)


def hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def searched_text(passage: Passage) -> str:
    """Return what a query is compared with: title and text in NFC, as queries are."""
    return unicodedata.normalize("NFC", f"{passage.title}\n{passage.text}")


def hash_of(value: Any) -> str:
    """Return a short hash of a JSON value, as hex."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _parse(line: bytes, path: Path) -> Passage:
    if not line.strip():
        raise ValueError('the line is empty; it must be {"id", "title", "text"}')
    check_utf8(line, path)
    try:
        return Passage.model_validate_json(line)
    except ValidationError as exc:
        shown = line.decode(errors="replace").strip()[:_SHOWN_CHARS]
        raise ValueError(
            f'{first_problem(exc)}; a line must be {{"id": text, "title": text, "text": text}} '
            f"and is {shown!r}"
        ) from exc
