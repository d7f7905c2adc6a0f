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

_BLOCK = re.compile(
    rf"{THINK_OPEN}.*?{THINK_CLOSE}|{ANSWER_OPEN}(?P<answer>.*?){ANSWER_CLOSE}", re.DOTALL
)


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
    thought, answer and call begins first hides what begins inside it.

    Args:
        text: the decoded turn, without its end-of-turn token.
        tool_format: how the model writes calls.
        opens_in_thought: the generation prompt ended with `<think>`, so the turn begins inside.
    """
    position = 0
    thought: str | None = None
    closed = text.find(THINK_CLOSE) if opens_in_thought else -1
    if closed >= 0:
        position = closed + len(THINK_CLOSE)
        thought = text[:closed].strip()
    answer: str | None = None
    calls: list[ParsedCall] = []
    block = _BLOCK.search(text, position)
    found = _find_calls(tool_format, text, position)
    while block is not None or found is not None:
        if found is not None and (block is None or found.start < block.start()):
            calls += found.calls
            position = found.end
        elif block is not None:
            position = block.end()
            if block["answer"] is not None:
                answer = block["answer"].strip()
            elif thought is None:
                thought = block.group()[len(THINK_OPEN) : -len(THINK_CLOSE)].strip()
        # Each is looked for again only where it was passed: text is read once, however long.
        if block is not None and block.start() < position:
            block = _BLOCK.search(text, position)
        if found is not None and found.start < position:
            found = _find_calls(tool_format, text, position)
    return TurnText(text=text, thought=thought, answer=answer, calls=tuple(calls))


def _find_calls(tool_format: ToolFormat, text: str, start: int) -> CallBlock | None:
    found = tool_format.find(text, start)
    if found is not None and not (start <= found.start < found.end <= len(text) and found.calls):
        raise ValueError(
            f"{type(tool_format).__name__}.find(text, {start}) returned {found}; a block of calls "
            f"lies between {start} and {len(text)}, is not empty and has at least one call"
        )
    return found
