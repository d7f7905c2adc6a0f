"""Refuse files that do not belong in the repository: reads the named files, else every tracked one.

Text that does not end with one newline or has blanks at a line's end, files over 4 MB, and private
keys. Prints what is wrong; exit 1 when there is something.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
MAX_BYTES = 4_000_000  # the committed base model is the largest file
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
# Written by tools, or texts that are kept as they came.
SKIPPED_TEXT = re.compile(r"^(LICENSE$|examples/.*/base/|tests/contract/(golden|run_0_1_0)/)")
SOURCE = re.compile(r"\.(py|md|toml|ya?ml|json|sh|txt|jinja|Dockerfile)$|^(Makefile|scripts/\w+)$")


def check_file(name: str, data: bytes) -> list[str]:
    """Return what is wrong with one file."""
    messages: list[str] = []
    if len(data) > MAX_BYTES:
        messages.append(f"{name}: {len(data) / 1e6:.1f} MB; the limit is {MAX_BYTES / 1e6:.0f} MB")
    if PRIVATE_KEY.search(data):
        messages.append(f"{name}: holds a private key")
    if not SOURCE.search(name) or SKIPPED_TEXT.match(name) or not data:
        return messages
    if not data.endswith(b"\n") or data.endswith(b"\n\n"):
        messages.append(f"{name}: must end with one newline")
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.endswith((b" ", b"\t", b"\r")):
            messages.append(f"{name}:{number}: blanks at the end of the line")
    return messages


def main() -> None:
    """Check the named files, or all tracked ones."""
    names = sys.argv[1:]
    if not names:
        command = ["git", "ls-files", "-z"]
        found = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
        names = [name for name in found.stdout.split("\0") if name]
    messages: list[str] = []
    for name in names:
        path = REPOSITORY / name
        if path.is_file() and not path.is_symlink():
            messages += check_file(name, path.read_bytes())
    print("\n".join(messages))
    sys.exit(1 if messages else 0)


if __name__ == "__main__":
    main()
