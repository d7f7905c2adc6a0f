"""Code blocks of the documentation, and the commands in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"^\*Not run by the tests: .+\.\*$")


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: str
    line: int
    language: str
    text: str
    marked: bool

    def __str__(self) -> str:
        """Name it in test ids."""
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return every code block of a page."""
    content = page.read_text()
    found = []
    for match in FENCE.finditer(content):
        before = content[: match.start()].rstrip().splitlines()
        found.append(
            Block(
                page=str(page.relative_to(REPOSITORY)),
                line=content[: match.start()].count("\n") + 1,
                language=match[2],
                text=re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE),
                marked=bool(before) and MARK.match(before[-1]) is not None,
            )
        )
    return found


def blocks_of(page: Path, language: str) -> list[Block]:
    """Return the blocks of a language that are to run."""
    return [one for one in blocks(page) if one.language == language and not one.marked]


def commands(text: str) -> list[str]:
    """Return the commands of a block, one a line, without comments."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = (re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines())
    return [line for line in lines if line]
