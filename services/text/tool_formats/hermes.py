"""Hermes calls, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen2.5, Qwen3."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agent_r1.text.tool_formats.base import (
    CallBlock,
    ParsedCall,
    ToolFormat,
    json_call,
    malformed,
    read_call,
    read_json,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
OBJECT = '{"name": ..., "arguments": {...}}'
"""What stands between the tags, as the model is told."""
_BLOCK = re.compile(rf"{OPEN}(.*?)(?:{CLOSE}|\Z)", re.DOTALL)


class HermesFormat(ToolFormat):
    """One JSON object between two tags for each call."""

    example = f"{OPEN}{OBJECT}{CLOSE}"
    trace = OPEN
    markup = (OPEN, CLOSE)
    closing_tag = CLOSE
    vllm_parser = "hermes"

    def find(self, text: str, start: int) -> CallBlock | None:
        """Return the next call; one that is never closed ends with the text."""
        block = _BLOCK.search(text, start)
        if block is None:
            return None
        is_closed = block.group().endswith(CLOSE)
        call = _read(block[1], block.end(), is_closed=is_closed)
        return CallBlock(block.start(), block.end(), [call])

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Write each call between tags of its own."""
        return "".join(f"{OPEN}{json_call(*call)}{CLOSE}" for call in calls)


def _read(body: str, end: int, *, is_closed: bool) -> ParsedCall:
    if not is_closed:
        return malformed(end, f"the tool call is not closed by {CLOSE}")
    first = len(body) - len(body.lstrip())
    try:
        call, last = read_json(body, first)
    except ValueError as exc:
        return malformed(end, exc)
    if body[last:].strip():
        where = f"Extra data at character {last - first}"
        return malformed(end, f"the tool call is not valid JSON: {where}")
    return read_call(call, end, example=OBJECT)
