"""The asserts of a test: where they stand, and what an exception that nobody sees has skipped.

`tester.py` writes the lines of asserts, loops and `with` blocks into names of the compiled test
(`Mark`), so that a frame of a traceback tells which of them its function has.
"""

from __future__ import annotations

import sys
import traceback
from types import CodeType, FrameType
from typing import NamedTuple, TypeGuard

TEST_NAME = "<test>"
SETUP_NAME = "<setup>"
TEST_NAMES = (SETUP_NAME, TEST_NAME)


class CheckFailedError(AssertionError):
    """An assert of the test does not hold."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.agent_r1_text = str(self)


class Mark(NamedTuple):
    """Lines of an assert, loop or `with` block, in a name that no program can write."""

    kind: str
    first: int
    last: int
    number: int

    @property
    def name(self) -> str:
        """The name."""
        return f"@{' '.join(map(str, self))}"


def find_marks(code: CodeType) -> list[Mark]:
    """Return the marks of a function of the test."""
    if code.co_filename not in TEST_NAMES:
        return []
    parts = [name[1:].split() for name in code.co_names if name[0] == "@" and " " in name]
    return [Mark(kind, *map(int, numbers)) for kind, *numbers in parts]


def is_failure(error: object) -> TypeGuard[AssertionError]:
    """Tell whether an assert of this side has failed, and not one of the other side."""
    return isinstance(error, AssertionError) and not hasattr(error, "agent_r1_proxy")


def check_kept(before: BaseException | None, after: BaseException | None) -> None:
    """Check that the code has let an exception pass that has kept the test from asserts.

    Args:
        before: left a function or `with` block of the test.
        after: what is on its way now.

    Raises:
        AssertionError: an assert has failed, or asserts were skipped, and the code has hidden it.
    """
    if before is None or after is before:
        return
    if is_failure(before):
        raise before
    if type(after) is not type(before) and cuts_off(before):
        raise CheckFailedError("the code has swallowed an exception that skipped asserts")


def cuts_off(error: BaseException) -> bool:
    """Tell whether there are asserts in what an exception has skipped.

    That is the rest of the function in a frame that has ended, and the rest of the `with` block in
    one that is just leaving it.
    """
    live: dict[FrameType, int] = {}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        live[frame] = frame.f_lineno
        frame = frame.f_back
    return any(
        _has_rest(find_marks(frame.f_code), line, live.get(frame))
        for frame, line in traceback.walk_tb(error.__traceback__)
    )


def _has_rest(marks: list[Mark], line: int, now: int | None) -> bool:
    if now is not None:
        blocks = [m for m in marks if m.kind == "with" and m.first <= now <= line <= m.last]
        if not blocks:  # the test itself has caught it
            return False
        block = max(blocks)
        marks = [m for m in marks if block.first <= m.first <= block.last and m != block]
    loops = [m.first for m in marks if m.kind == "loop" and m.first <= line <= m.last]
    return any(m.kind == "assert" and m.last >= min([line, *loops]) for m in marks)
