"""Data files: opened plain or gzip-compressed, and called by name where they are not JSON lines.

tasks.py, the warm start's reader and `agent-r1 config check` ask, so that a Parquet file is
called one and not "invalid JSON".
"""

from __future__ import annotations

import gzip
import zlib
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
}
REMEDIES = {
    b"PAR1": 'convert it: pandas.read_parquet(FILE).to_json(OUT, orient="records", lines=True); '
    "if it holds tasks, give its name the suffix .parquet instead",
    b"ARROW1": 'convert it: pandas.read_feather(FILE).to_json(OUT, orient="records", lines=True)',
    b"\x1f\x8b": "rename it to .gz",
    b"\x28\xb5\x2f\xfd": "unpack it: zstd -d FILE",
    b"version https://git-lfs": "fetch it: git lfs pull",
}
CONVERT = "convert it to JSON lines, one object a line"


def open_data(path: Path) -> BinaryIO | gzip.GzipFile:
    """Open a data file for reading its bytes, unpacked where it has the suffix .gz."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def foreign_format(path: Path) -> str | None:
    """Say what a file is that holds no JSON lines, and what to do; None where it may hold some.

    Args:
        path: plain, or gzip-compressed with the suffix .gz; one that cannot be read gives None.
    """
    try:
        with open_data(path) as file:
            start = file.read(FIRST_BYTES)
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
