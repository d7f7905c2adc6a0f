"""Refuse files and words that do not belong in the repository; print what is wrong, exit 1 if any.

    scripts/files.py [FILE ...]      the named files, or every tracked and every new one

Refused: text that does not end with one newline or has blanks at a line's end, files over 6 MB,
private keys, unfinished work, debris of a debugger, paths of one machine, and merge marks.
`# allow-word` on a line lets its words pass.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
MAX_BYTES = 6_000_000  # a committed base model is the largest file
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
# Written by tools, or texts that are kept as they came.
KEPT_AS_IT_CAME = re.compile(r"^(LICENSE$|examples/.*/base/|tests/contract/(golden|run_\w+)/)")
SOURCE = re.compile(
    r"\.(py|md|toml|ya?ml|json|sh|txt|jinja|Dockerfile)$|^(Makefile|(scripts|deploy/docker)/[\w-]+)$"
)
ALLOW = "allow-word"
# Each with what is wrong with it.
PATTERNS = {
    r"\b(TODO|FIXME|XXX|HACK)\b": "unfinished work belongs in an issue",  # allow-word
    r"raise NotImplementedError": "unfinished work",  # allow-word
    r"\b(breakpoint\(\)|pdb\.set_trace)": "left from debugging",  # allow-word
    r"(?<![\w.])/(root|home)/\w": "a path of one machine",
    r"^(<{7}|>{7}) ": "merge mark",
    r"@pytest\.mark\.(skip|xfail)\(?\)?$": "a skipped test needs a reason",
}
# Only these may name the folder beside the repository that holds real data.
SHARED_ALLOWED = {".ci/run", "tests/conftest.py"}
SHARED = re.compile(r"\.\./shared\b")
ANY_WORD = re.compile(r"^(LICENSE|proto/schemas/|examples/.*/base/)")
MAX_TEXT_BYTES = 1_000_000


def check_bytes(name: str, data: bytes) -> list[str]:
    """Return what is wrong with the size, the keys and the line ends of one file."""
    messages: list[str] = []
    if len(data) > MAX_BYTES:
        messages.append(f"{name}: {len(data) / 1e6:.1f} MB; the limit is {MAX_BYTES / 1e6:.0f} MB")
    if PRIVATE_KEY.search(data):
        messages.append(f"{name}: holds a private key")
    if not SOURCE.search(name) or KEPT_AS_IT_CAME.match(name) or not data:
        return messages
    if not data.endswith(b"\n") or data.endswith(b"\n\n"):
        messages.append(f"{name}: must end with one newline")
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.endswith((b" ", b"\t", b"\r")):
            messages.append(f"{name}:{number}: blanks at the end of the line")
    return messages


def check_text(name: str, text: str) -> list[str]:
    """Return one message for each line of a file that must not stay."""
    messages: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if ALLOW in line:
            continue
        for pattern, problem in PATTERNS.items():
            if re.search(pattern, line):
                messages.append(f"{name}:{number}: {problem}: {line.strip()[:80]}")
        if SHARED.search(line) and name not in SHARED_ALLOWED:
            messages.append(f"{name}:{number}: names a folder outside the repository")
    return messages


def main() -> None:
    """Check the named files, or all."""
    names = sys.argv[1:]
    if not names:
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        found = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
        names = sorted(name for name in found.stdout.split("\0") if name)
    messages: list[str] = []
    for name in names:
        path = REPOSITORY / name
        if not path.is_file() or path.is_symlink():
            continue
        data = path.read_bytes()
        messages += check_bytes(name, data)
        if not (ANY_WORD.match(name) or len(data) > MAX_TEXT_BYTES or b"\0" in data):
            messages += check_text(name, data.decode("utf-8", errors="replace"))
    print("\n".join(messages))
    sys.exit(1 if messages else 0)


if __name__ == "__main__":
    main()
