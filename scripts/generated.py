"""Files that a script writes from the source, and their tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(
    about: str,
    files: dict[Path, str],
    arguments: list[str] | None = None,
    gone: Collection[Path] = (),
) -> None:
    """Do what the command line asks of a script that writes `files`.

    Args:
        about: What the script is for; `--help` shows its first line.
        files: The text of each file.
        arguments: The command line without the script's name; None takes that of the process.
        gone: Files that the script wrote earlier, and that are to be removed.

    Raises:
        SystemExit: With `--check`, a file is missing, has another text, or should be gone. Nothing
            is written then.
    """
    parser = argparse.ArgumentParser(description=about.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    only_check = parser.parse_args(arguments).check
    stale = [*(path for path, text in files.items() if not is_current(path, text)), *gone]
    if only_check:
        if stale:
            names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
            sys.exit(f"stale: {names}; run scripts/{parser.prog}")
        return
    for path in stale:
        path.write_text(files[path], encoding="utf-8") if path in files else path.unlink()
    print(f"{len(files)} written by scripts/{parser.prog}, {len(stale)} changed")


def is_current(path: Path, text: str) -> bool:
    """Tell whether a file has this text."""
    return path.exists() and path.read_text(encoding="utf-8") == text


def as_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Return a Markdown table of rows, whose keys are its columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[show(row.get(name)) for name in names] for row in rows]
    texts = [f"| {' | '.join(line)} |\n" for line in (names, *lines)]
    return "".join([texts[0], "|---" * len(names), "|\n", *texts[1:]])


def show(value: object) -> str:
    """Return the text of a cell; of a number, three digits, or all that stand before the point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else str(value).replace("|", r"\|")
