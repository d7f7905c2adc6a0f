"""Files that a script writes from the source: to write them, or to say which are out of date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(about: str, files: dict[Path, str], arguments: list[str] | None = None) -> None:
    """Do what the command line asks of a script that writes `files`.

    Args:
        about: What the script is for; `--help` shows its first line.
        files: The text of each file.
        arguments: The command line without the script's name; None takes that of the process.

    Raises:
        SystemExit: With `--check`, a file is missing or has another text. Nothing is written then.
    """
    parser = argparse.ArgumentParser(description=about.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    only_check = parser.parse_args(arguments).check
    stale = [path for path, text in files.items() if not is_current(path, text)]
    if only_check:
        if stale:
            names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
            sys.exit(f"stale: {names}; run scripts/{parser.prog}")
        return
    for path in stale:
        path.write_text(files[path], encoding="utf-8")
    print(f"{len(files)} written by scripts/{parser.prog}, {len(stale)} changed")


def is_current(path: Path, text: str) -> bool:
    """Tell whether a file has this text."""
    return path.exists() and path.read_text(encoding="utf-8") == text
