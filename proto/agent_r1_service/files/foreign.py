"""Files that users bring: opened plain or gzip-compressed, and called what they are.

The readers of tasks, dialogues, corpora and configurations ask, so that a Parquet file is called
one and not "invalid JSON", and so that text is read with or without a byte order mark everywhere.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

FIRST_BYTES = 4096
MAGIC = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\x1f\x8b": "a gzip file without the suffix .gz",
    b"\x28\xb5\x2f\xfd": "a Zstandard file",
    b"PK\x03\x04": "a zip archive or an Excel file",
    b"SQLite format 3\0": "an SQLite database",
    b"version https://git-lfs": "a Git LFS pointer and not the file itself",
    codecs.BOM_UTF16_LE: "UTF-16 text",
    codecs.BOM_UTF16_BE: "UTF-16 text",
}
_FROM_UTF16 = "save it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE > OUT"
REMEDIES = {
    b"PAR1": 'convert it: pandas.read_parquet(FILE).to_json(OUT, orient="records", lines=True); '
    "if it holds tasks, give its name the suffix .parquet instead",
    b"ARROW1": 'convert it: pandas.read_feather(FILE).to_json(OUT, orient="records", lines=True)',
    b"\x1f\x8b": "rename it to .gz",
    b"\x28\xb5\x2f\xfd": "unpack it: zstd -d FILE",
    b"version https://git-lfs": "fetch it: git lfs pull",
    codecs.BOM_UTF16_LE: _FROM_UTF16,
    codecs.BOM_UTF16_BE: _FROM_UTF16,
}
_FROM_SAVED = "convert it: datasets.load_from_disk(FOLDER).to_json(OUT)"
CONVERT = "convert it to JSON lines, one object a line"


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


def check_utf8(line: bytes) -> None:
    """Check that a line is UTF-8 text.

    Raises:
        ValueError: it is not; the text has the remedy.
    """
    try:
        line.decode()
    except UnicodeDecodeError as exc:
        raise ValueError(_not_utf8(exc)) from exc


def read_text(path: Path) -> str:
    """Return the text of a file that a user wrote: UTF-8, with or without a byte order mark.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8; the text has line and remedy.
    """
    data = path.read_bytes()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"it is UTF-16 text; {_FROM_UTF16}")
    try:
        return "\n".join(data.decode("utf-8-sig").replace("\r\n", "\n").split("\r"))
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise ValueError(f"line {line}: {_not_utf8(exc)}") from exc


def _not_utf8(exc: UnicodeDecodeError) -> str:
    return (
        f"Invalid UTF-8 (byte 0x{exc.object[exc.start]:02x}); save the file as UTF-8, as "
        "`iconv -f LATIN1 -t UTF-8 FILE > OUT` does if it is Latin-1"
    )


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
    for magic, name in MAGIC.items():
        if start.startswith(magic):
            return f"{path} is {name} and not JSON lines; {REMEDIES.get(magic, CONVERT)}"
    if b"\0" in start:
        return f"{path} is a binary file and not JSON lines; {CONVERT}"
    if start.lstrip().startswith(b"["):
        return f"{path} is one JSON array and not JSON lines; {CONVERT}: jq -c '.[]' FILE > OUT"
    return None
