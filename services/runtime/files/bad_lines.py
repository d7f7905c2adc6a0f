"""What is wrong with the lines of a data file: the first ten, and how many there are.

tasks.py, the warm start's reader and the corpus's read on behind a bad line, so that one look at
the message shows whether a single line or the whole file has to be mended.
"""

from __future__ import annotations

import re

from pydantic import ValidationError

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
