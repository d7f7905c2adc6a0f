"""Calls of Llama 3.x, `{"name": ..., "parameters": {...}}` without tags, separated by `;`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from agent_r1.text.tool_formats.base import (
    CallBlock,
    ToolFormat,
    first_match,
    growing,
    json_call,
    read_call_at,
)

PYTHON_TAG = "<|python_tag|>"
OBJECT = '{"name": ..., "parameters": {...}}'
# Text may hold other braces, so a call is known by its first key.
_START = re.compile(
    rf'(?:{re.escape(PYTHON_TAG)}\s*)?(\{{\s*"(?:name"\s*:|type"\s*:\s*"function"))', re.DOTALL
)
_NAME, _TYPE, _FUNCTION = map(growing, ('"name"', '"type"', '"function"'))
_KEYS = rf"{_NAME}\s*(?:\Z|:)|{_TYPE}\s*(?:\Z|:\s*(?:\Z|{_FUNCTION}))"
_OBJECT = rf"\{{\s*(?:\Z|{_KEYS})"
_BEGINS = re.compile(rf"{_OBJECT}|{growing(PYTHON_TAG)}\s*(?:\Z|{_OBJECT})")


class Llama3JsonFormat(ToolFormat):
    """A bare JSON object for each call: a call begins where `{"name":` stands."""

    example = OBJECT
    trace = '"parameters"'
    markup = (PYTHON_TAG,)
    separator = ";"
    endings = ("}",)
    vllm_parser = "llama3_json"

    def find(self, text: str, start: int) -> CallBlock | None:
        """Return the next call; one that is no JSON ends with the text."""
        found = _START.search(text, start)
        if found is None:
            return None
        call = read_call_at(
            text,
            found.start(1),
            example=OBJECT,
            argument_keys=("parameters", "arguments"),
            other_keys=("type",),
        )
        return CallBlock(found.start(), call.end, [call])

    def begins(self, text: str, start: int) -> int:
        """Return where the next object or its tag may begin."""
        return first_match(_BEGINS, text, start)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Write objects, with `; ` between them."""
        return "; ".join(json_call(*call, key="parameters") for call in calls)
