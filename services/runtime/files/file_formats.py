"""Files that users bring: opened plain or gzip-compressed, called what they are, line by line.

The readers of tasks, dialogues, corpora and configurations ask, so that a Parquet file is called
one and not "invalid JSON", and so that text is read with or without a byte order mark everywhere.
They read on behind a bad line, so that one look at the message shows whether a single line or the
whole file has to be mended.
"""

from __future__ import annotations

import codecs
import functools
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

FIRST_BYTES = 4096
CONVERT = "convert it to JSON lines, one object a line"
_AS_UTF_8 = "save it as UTF-8: iconv -f {name} -t UTF-8 FILE > OUT"
_UTF_16 = ("UTF-16 text", _AS_UTF_8.format(name="UTF-16"))
_UTF_32 = ("UTF-32 text", _AS_UTF_8.format(name="UTF-32"))
FORMATS = {
    b"PAR1": (
        "a Parquet file",
        'convert it: pandas.read_parquet(FILE).to_json(OUT, orient="records", lines=True); '
        "if it holds tasks, give its name the suffix .parquet instead",
    ),
    b"ARROW1": (
        "an Arrow file",
        'convert it: pandas.read_feather(FILE).to_json(OUT, orient="records", lines=True)',
    ),
    b"\x1f\x8b": ("a gzip file without the suffix .gz", "rename it to .gz"),
    b"\x28\xb5\x2f\xfd": ("a Zstandard file", "unpack it: zstd -d FILE"),
    b"PK\x03\x04": ("a zip archive or an Excel file", CONVERT),
    b"SQLite format 3\0": ("an SQLite database", CONVERT),
    b"version https://git-lfs": (
        "a Git LFS pointer and not the file itself",
        "fetch it: git lfs pull",
    ),
    # That of UTF-32 begins with that of UTF-16.
    codecs.BOM_UTF32_LE: _UTF_32,
    codecs.BOM_UTF32_BE: _UTF_32,
    codecs.BOM_UTF16_LE: _UTF_16,
    codecs.BOM_UTF16_BE: _UTF_16,
}
"""Kind of a file by its first bytes, and what to do."""
_FROM_SAVED = "convert it: datasets.load_from_disk(FOLDER).to_json(OUT)"
ENCODINGS = (
    *("cp932", "euc_jp", "cp949", "gb18030", "big5"),
    *("cp1252", "cp1250", "cp1251", "koi8_r"),
)
"""Encodings in which a text that is not UTF-8 is looked for: the usual ones of older programs."""
_SAMPLE_BYTES = 65_536
_READINGS = 3
_SHOWN_CHARS = 20


_BRANCH = re.compile(r"str|list\[.*\]|function-.*")
"""How pydantic names the branches of a union, which a user did not write."""
SHOWN = 10
"""Most bad lines that a message shows."""


class LineError(ValueError):
    """A line that cannot be used; its arguments are the problem and the remedy."""

    def __str__(self) -> str:
        """Return both."""
        return "; ".join(self.args)


class BadLines:
    """Collects what is wrong with the lines of one file.

    Args:
        name: of the file, for the message.
    """

    def __init__(self, name: object) -> None:
        self._name = name
        self._first: list[tuple[str, str, str]] = []
        self._count = 0

    def __bool__(self) -> bool:
        """Say whether there are any."""
        return self._count > 0

    def add(self, where: str, problem: ValueError, remedy: str = "") -> None:
        """Take up one line.

        Args:
            where: file and line, or row.
            problem: what is wrong with it. The remedy of a `LineError` is said once for all lines
                that have the same.
            remedy: of lines that do not have the fields they should.
        """
        self._count += 1
        if isinstance(problem, ValidationError):
            problem = LineError(first_problem(problem), remedy)
        text, said = problem.args if isinstance(problem, LineError) else (str(problem), "")
        if len(self._first) < SHOWN:
            self._first.append((where, text, said))

    def text(self, total: int) -> str:
        """Return the message.

        Args:
            total: lines that were read.
        """
        lines = [f"{where}: {problem}" for where, problem, _ in self._first]
        remedies = "".join(f"; {r}" for r in dict.fromkeys(r for *_, r in self._first) if r)
        if self._count == 1:
            return lines[0] + remedies
        left = self._count - len(lines)
        shown = [*lines, *([f"and {left} more"] if left else [])]
        head = f"{self._name}: {self._count} of {total} lines cannot be used:"
        return "\n  ".join([head, *shown]) + remedies


def first_problem(exc: ValidationError) -> str:
    """Return the problem that is deepest in a line, with the names of the fields around it.

    Of a text or a list of messages it says what is wrong in a message, and not that it is no text.
    """
    deepest = max(exc.errors(), key=lambda error: len(error["loc"]))
    names = [str(part) for part in deepest["loc"]]
    where = ".".join(name for name in names if not _BRANCH.fullmatch(name))
    message = deepest["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def open_data(path: Path) -> BinaryIO | gzip.GzipFile:
    """Open a data file for reading its bytes, unpacked where it has the suffix .gz."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield every line of a data file with its number, without a byte order mark.

    Files that were joined have such a mark in the middle too.
    """
    with open_data(path) as file:
        for number, line in enumerate(file, start=1):
            yield number, line.removeprefix(codecs.BOM_UTF8)


def check_utf8(line: bytes, path: Path) -> None:
    """Check that a line of a file is UTF-8 text.

    Raises:
        LineError: it is not.
    """
    try:
        line.decode()
    except UnicodeDecodeError as exc:
        raise LineError(
            _not_utf8(exc, exc.start), _remedy_of(path, path.stat().st_mtime_ns)
        ) from exc


def read_text(path: Path) -> str:
    """Return the text of a file that a user wrote: UTF-8, with or without a byte order mark.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8; the text has line and remedy.
    """
    data = path.read_bytes()
    if marked := _marked(data):
        raise ValueError(marked)
    try:
        return "\n".join(data.decode("utf-8-sig").replace("\r\n", "\n").split("\r"))
    except UnicodeDecodeError as exc:
        raise not_utf8(exc) from exc


def not_utf8(exc: UnicodeDecodeError) -> LineError:
    """Return what to say of the bytes of a whole file that are no UTF-8 text."""
    data = exc.object
    line = data.count(b"\n", 0, exc.start) + 1
    column = exc.start - (data.rfind(b"\n", 0, exc.start) + 1)
    return LineError(f"line {line}: {_not_utf8(exc, column)}", _remedy(data.split(b"\n")))


def _not_utf8(exc: UnicodeDecodeError, column: int) -> str:
    odd = exc.object[exc.start : exc.start + 4].split(b"\n")[0]
    return f"Invalid UTF-8 (0x{odd.hex()} at byte {column + 1} of the line)"


@functools.lru_cache(maxsize=8)  # every bad line of a file asks
def _remedy_of(path: Path, changed_at: int) -> str:
    return _remedy(line for _, line in numbered_lines(path))


def _remedy(lines: Iterable[bytes]) -> str:
    """Say how to make a text UTF-8 that is not."""
    sample, has_utf8 = bytearray(), False
    for line in lines:
        if line.isascii():
            continue
        if _is_utf8(line):
            has_utf8 = True
        elif len(sample) < _SAMPLE_BYTES:
            sample += line + b"\n"
    if has_utf8:
        return "other lines are UTF-8, so such a line is damaged or of another file: write it again"
    return _conversion(bytes(sample))


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _conversion(sample: bytes) -> str:
    # Of a short text several encodings are possible, and only a reader knows which one is right.
    readings = _readings(sample)
    shown = ", ".join(f"as {name} it reads {text!r}" for name, text in readings.items())
    if len(readings) == 1:
        return f"{shown}: convert it with `iconv -f {next(iter(readings))} -t UTF-8 FILE > OUT`"
    which = f"which is right? {shown}" if shown else "which encoding is it in?"
    return f"{which}: convert it from that ENCODING with `iconv -f ENCODING -t UTF-8 FILE > OUT`"


def _readings(sample: bytes) -> dict[str, str]:
    """Return how a text may read, by encodings as iconv calls them, the likeliest first."""
    from charset_normalizer import from_bytes  # few files need it

    found: dict[str, str] = {}
    for match in islice(from_bytes(sample, cp_isolation=list(ENCODINGS)), _READINGS):
        known = {match.encoding, *match.could_be_from_charset}
        name = next(name for name in ENCODINGS if name in known)
        found[name.replace("_", "-").upper()] = _excerpt(str(match))
    return found


def _excerpt(text: str) -> str:
    """Return the first characters of a text that are not ASCII, with some beside them."""
    at = next((i for i, character in enumerate(text) if not character.isascii()), 0)
    return text[max(0, at - 5) : at + _SHOWN_CHARS].split("\n")[0].strip()


def _marked(data: bytes) -> str | None:
    """Say of which other encoding a byte order mark is; None without such a mark."""
    for mark, (name, remedy) in FORMATS.items():
        if name.endswith(" text") and data.startswith(mark):
            return f"it is {name}; {remedy}"
    return None


def null_bytes(data: bytes) -> str | None:
    """Say what null bytes are in a file that should be text; None where it has none."""
    if b"\0" not in data:
        return None
    if marked := _marked(data):
        return marked
    line = data.count(b"\n", 0, data.index(b"\0")) + 1
    if data.count(b"\0") * 4 > len(data):  # every other byte of letters, digits and spaces
        order = "BE" if data.startswith(b"\0") else "LE"
        how = "as UTF-16 text has; save it as UTF-8"
        return f"line {line} has null bytes, {how}: iconv -f UTF-16{order} -t UTF-8 FILE > OUT"
    return f"line {line} has a null byte; remove it: tr -d '\\000' < FILE > OUT"


def foreign_format(path: Path) -> str | None:
    """Say what a file is that holds no JSON lines, and what to do; None where it may hold some.

    Args:
        path: plain, or gzip-compressed with the suffix .gz; one that cannot be read gives None.
    """
    if path.is_dir():
        saved = (path / "state.json").is_file()
        how = _FROM_SAVED if saved else "name a file in it"
        return f"{path} is a folder and not JSON lines; {how}"
    try:
        with open_data(path) as file:
            start = file.read(FIRST_BYTES).removeprefix(codecs.BOM_UTF8)
    except (OSError, EOFError, zlib.error):
        return None
    for magic, (name, remedy) in FORMATS.items():
        if start.startswith(magic):
            return f"{path} is {name} and not JSON lines; {remedy}"
    if b"\0" in start:
        return f"{path} is a binary file and not JSON lines; {CONVERT}"
    if start.lstrip().startswith(b"["):
        return f"{path} is one JSON array and not JSON lines; {CONVERT}: jq -c '.[]' FILE > OUT"
    return None
