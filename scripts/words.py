"""Refuse words that do not belong in the repository: reads every tracked text file, prints lines.

Unfinished work, debris of a debugger, files of one machine, and merge marks. `# allow-word` on a
line lets it pass.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
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
SKIPPED = re.compile(r"^(LICENSE|proto/schemas/|examples/.*/base/)")
MAX_BYTES = 1_000_000


def list_files() -> list[str]:
    """Return the tracked and the new, not ignored files, relative to the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return sorted(name for name in found.stdout.split("\0") if name)


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
    """Print every problem; exit 1 when there is one."""
    messages: list[str] = []
    for name in list_files():
        path = REPOSITORY / name
        if SKIPPED.match(name) or not path.is_file() or path.is_symlink():
            continue
        data = path.read_bytes()
        if len(data) > MAX_BYTES or b"\0" in data:
            continue
        messages += check_text(name, data.decode("utf-8", errors="replace"))
    print("\n".join(messages))
    sys.exit(1 if messages else 0)


if __name__ == "__main__":
    main()
