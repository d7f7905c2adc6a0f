"""What the model wrote in one turn: its thought, its answer and its tool calls.

chat_format.py gives the decoded text of a turn and gets `TurnText`, for turns.py, and maps the end
of each call back to the sampled token that closes it. Text is only ever read here, never
re-encoded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agent_r1.rollout.tool_formats import HERMES, CallBlock, ParsedCall, ToolFormat

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
ANSWER_OPEN = "<answer>"
ANSWER_CLOSE = "</answer>"
MARKUP = (THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)

_OPENING = re.compile(f"{THINK_OPEN}|{ANSWER_OPEN}")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CLOSE_OF = {THINK_OPEN: THINK_CLOSE, ANSWER_OPEN: ANSWER_CLOSE}


@dataclass(frozen=True)
class _Block:
    """A thought or an answer, its tags included."""

    start: int
    end: int
    opening: str
    content: str


@dataclass(frozen=True)
class TurnText:
    """One turn of the model, read."""

    text: str
    """The whole turn, without its end-of-turn token."""
    thought: str | None
    """Inside the first `<think>` block; None without one."""
    answer: str | None
    """Inside the last `<answer>` block; None without one."""
    calls: tuple[ParsedCall, ...]
    """Tool calls, in order; those inside a thought do not count."""


def parse_turn(
    text: str, *, tool_format: ToolFormat = HERMES, opens_in_thought: bool = False
) -> TurnText:
    """Read one turn.

    A thought that is never closed hides nothing: calls and answers in it count. Whichever of
    thought, answer and call begins first hides what begins inside it. A tag that an argument of a
    call quotes closes nothing.

    Args:
        text: the decoded turn, without its end-of-turn token.
        tool_format: how the model writes calls.
        opens_in_thought: the generation prompt ended with `<think>`, so the turn begins inside.
    """
    position = 0
    thought: str | None = None
    closed = _find_closing(tool_format, text, THINK_CLOSE, 0) if opens_in_thought else -1
    if closed >= 0:
        position = closed + len(THINK_CLOSE)
        thought = text[:closed].strip()
    answer: str | None = None
    calls: list[ParsedCall] = []
    unclosed: set[str] = set()
    block = _find_block(tool_format, text, position, unclosed)
    found = _find_calls(tool_format, text, position)
    while block is not None or found is not None:
        if found is not None and (block is None or found.start < block.start):
            calls += found.calls
            position = found.end
        elif block is not None:
            position = block.end
            if block.opening == ANSWER_OPEN:
                answer = block.content
            elif thought is None:
                thought = block.content
        # Each is looked for again only where it was passed: text is read once, however long.
        if block is not None and block.start < position:
            block = _find_block(tool_format, text, position, unclosed)
        if found is not None and found.start < position:
            found = _find_calls(tool_format, text, position)
    return TurnText(text=text, thought=thought, answer=answer, calls=tuple(calls))


def _find_block(
    tool_format: ToolFormat, text: str, start: int, unclosed: set[str]
) -> _Block | None:
    """Return the first thought or answer that begins at or after `start` and is closed.

    Opening tags that nothing closes from here on are added to `unclosed`, and looked at no more.
    """
    for opening in _OPENING.finditer(text, start):
        if opening.group() in unclosed:
            continue
        tag = _CLOSE_OF[opening.group()]
        closing = _find_closing(tool_format, text, tag, opening.end())
        if closing >= 0:
            content = text[opening.end() : closing].strip()
            return _Block(opening.start(), closing + len(tag), opening.group(), content)
        unclosed.add(opening.group())
    return None


def _find_closing(tool_format: ToolFormat, text: str, tag: str, start: int) -> int:
    """Return where a closing tag begins that no string of a readable call quotes; -1 without."""
    closing = text.find(tag, start)
    # A call is looked for in the whole text only where one begins: see `parse_turn`.
    while closing >= 0 and tool_format.find(text[start:closing], 0) is not None:
        found = _find_calls(tool_format, text, start)
        if found is None:
            break
        read = [call.end for call in found.calls if not call.error]
        quoted = '"' in _STRING.sub("", text[found.start : closing])
        if read and closing < read[-1] and quoted:
            closing = text.find(tag, read[-1])
        start = max(found.start + 1, read[-1] if read else found.end)
    return closing


def _find_calls(tool_format: ToolFormat, text: str, start: int) -> CallBlock | None:
    found = tool_format.find(text, start)
    if found is not None and not (start <= found.start < found.end <= len(text) and found.calls):
        raise ValueError(
            f"{type(tool_format).__name__}.find(text, {start}) returned {found}; a block of calls "
            f"lies between {start} and {len(text)}, is not empty and has at least one call"
        )
    return found
