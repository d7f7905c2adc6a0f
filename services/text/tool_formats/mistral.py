"""Mistral: `[TOOL_CALLS] [{...}, {...}]`, and `[TOOL_CALLS]name[ARGS]{...}` since tokenizer v11."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agent_r1.text.tool_formats.base import (
    CallBlock,
    ParsedCall,
    ToolFormat,
    first_match,
    growing,
    json_call,
    malformed,
    read_call,
    read_call_at,
    read_json,
)

TAG, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
OBJECT = '{"name": ..., "arguments": {...}}'
_NAMED = re.compile(rf"([^\s\[\]{{]+)\s*(?:{re.escape(CALL_ID)}([^\[\s]*)\s*)?{re.escape(ARGS)}\s*")
_BEGINS = re.compile(growing(TAG))
_SPACE = re.compile(r"\s*")


class MistralFormat(ToolFormat):
    """A list of JSON objects behind one tag, or a tag, a name and a JSON object for each call."""

    example = f"{TAG}[{OBJECT}]"
    trace = TAG
    markup = (TAG, ARGS, CALL_ID)
    endings = ("}", "]")
    vllm_parser = "mistral"

    def find(self, text: str, start: int) -> CallBlock | None:
        """Return the next call or list of calls; what cannot be read ends with the text."""
        tag = text.find(TAG, start)
        if tag < 0:
            return None
        first = _skip(text, tag + len(TAG))
        if (found := _NAMED.match(text, first)) is None:
            calls = _listed_calls(text, first)
        else:
            named = {"name": found[1], "id": found[2]}
            how = {"example": f"{TAG}name{ARGS}{{...}}", "other_keys": ("id",)}
            calls = [read_call_at(text, found.end(), named, **how)]
        return CallBlock(tag, calls[-1].end, calls)

    def begins(self, text: str, start: int) -> int:
        """Return where the next tag may begin."""
        return first_match(_BEGINS, text, start)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Write one list."""
        return f"{TAG}[{', '.join(json_call(*call) for call in calls)}]"


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return position if found is None else found.end()


def _listed_calls(text: str, first: int) -> list[ParsedCall]:
    """Read objects from `first` on: a list of them, or one alone."""
    is_list = text.startswith("[", first)
    position = _skip(text, first + 1) if is_list else first
    calls: list[ParsedCall] = []
    while True:
        try:
            call, end = read_json(text, position)
        except ValueError as exc:
            return [*calls, malformed(len(text), exc)]
        position = _skip(text, end)
        closed = text.startswith("]", position)
        end = position + 1 if is_list and closed else end
        calls.append(read_call(call, end, example=OBJECT, other_keys=("id",)))
        if not is_list or closed:
            return calls
        if not text.startswith(",", position):
            return [*calls, malformed(len(text), "the list of tool calls is not closed by ]")]
        position = _skip(text, position + 1)
