"""A program as text: the last fenced block of a turn is a call of `code_tests`.

So that a model without tools is scored by the same tests, in the same sandbox, as one that calls
the tool. A block that begins in a thought or an answer is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from agent_r1.text.reading import ANSWER_CLOSE, ANSWER_OPEN, THINK_CLOSE, THINK_OPEN
from agent_r1.text.tool_formats.base import (
    CallBlock,
    ToolFormat,
    first_match,
    growing,
    read_call,
)
from agent_r1_proto.tools import TESTS_TOOL

EXAMPLE = "```python\nPROGRAM\n```"
_CLOSING = {THINK_OPEN: THINK_CLOSE, ANSWER_OPEN: ANSWER_CLOSE}
# Whichever begins first hides what begins inside it.
_PART = re.compile(
    rf"{THINK_OPEN}|{ANSWER_OPEN}|^```(?:[ \t]*(?:python|py))?[ \t]*\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
_BEGINS = re.compile(rf"^{growing('```')}", re.MULTILINE)


class CodeBlockFormat(ToolFormat):
    """The last block between ``` and ```, in no language or in Python."""

    example = EXAMPLE
    trace = "```python"
    in_template = False

    def find(self, text: str, start: int) -> CallBlock | None:
        """Return the last block, outside of thoughts and answers, as a call."""
        blocks = list(_blocks(text, start))
        if not blocks:
            return None
        last = blocks[-1]
        call = {"name": TESTS_TOOL, "arguments": {"code": last["code"]}}
        return CallBlock(last.start(), last.end(), [read_call(call, last.end(), example=EXAMPLE)])

    def begins(self, text: str, start: int) -> int:
        """Return where the next fence may begin."""
        return first_match(_BEGINS, text, start)


def _blocks(text: str, position: int) -> Iterator[re.Match[str]]:
    """Yield the blocks that begin in no closed thought and no answer."""
    closings = dict.fromkeys(_CLOSING, position)
    while part := _PART.search(text, position):
        position = part.end()
        if part["code"] is not None:
            yield part
            continue
        # Each is looked for again only where it was passed, and never where there is none.
        if 0 <= closings[part[0]] < position:
            closings[part[0]] = text.find(_CLOSING[part[0]], position)
        closed = closings[part[0]]
        # Of nested answers, the innermost is one.
        nested = part[0] == ANSWER_OPEN and text.find(ANSWER_OPEN, position, closed) >= 0
        if closed >= 0 and not nested:
            position = closed + len(_CLOSING[part[0]])
