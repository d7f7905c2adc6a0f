"""Hermes calls, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen2.5, Qwen3."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agent_r1.text.tool_formats.base import (
    CallBlock,
    ParsedCall,
    ToolFormat,
    end_of_object,
    first_match,
    growing,
    json_call,
    malformed,
    read_call,
    read_json,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
OBJECT = '{"name": ..., "arguments": {...}}'
"""Form of what stands between the tags, as the model is told."""
_OPENING = re.compile(rf"{OPEN}\s*")
_BEGINS = re.compile(growing(OPEN))


class HermesFormat(ToolFormat):
    """One JSON object between two tags for each call."""

    example = f"{OPEN}{OBJECT}{CLOSE}"
    trace = OPEN
    markup = (OPEN, CLOSE)
    closing_tag = CLOSE
    endings = (CLOSE,)
    vllm_parser = "hermes"

    def find(self, text: str, start: int) -> CallBlock | None:
        """Return the next call; one that is never closed ends with the text."""
        opening = _OPENING.search(text, start)
        if opening is None:
            return None
        # Behind the object: a tag that a string in it quotes closes nothing.
        closing = text.find(CLOSE, end_of_object(text, opening.end()))
        end = len(text) if closing < 0 else closing + len(CLOSE)
        call = _read(text[opening.end() : end].removesuffix(CLOSE), end, is_closed=closing >= 0)
        return CallBlock(opening.start(), end, [call])

    def begins(self, text: str, start: int) -> int:
        """Return where the next tag may begin."""
        return first_match(_BEGINS, text, start)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Write each call between tags of its own."""
        return "".join(f"{OPEN}{json_call(*call)}{CLOSE}" for call in calls)


def _read(body: str, end: int, *, is_closed: bool) -> ParsedCall:
    if not is_closed:
        return malformed(end, f"the tool call is not closed by {CLOSE}")
    try:
        call, last = read_json(body)
    except ValueError as exc:
        return malformed(end, exc)
    if body[last:].strip():
        where = f"Extra data at character {last}"
        return malformed(end, f"the tool call is not valid JSON: {where}")
    return read_call(call, end, example=OBJECT)
