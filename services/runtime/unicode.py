"""Replaces lone surrogates, which UTF-8 cannot encode, and escapes control characters.

Python code makes lone surrogates easily (`json.loads` of an escape, file names). The tool service
repairs what tools return, rollout what environments return and what exceptions say.
"""

from __future__ import annotations

import re

from pydantic import JsonValue


def repair_text(text: str) -> str:
    """Return text with every lone surrogate replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def repair_json(value: JsonValue) -> JsonValue:
    """Return a JSON value with every text in it repaired, keys included."""
    if isinstance(value, str):
        return repair_text(value)
    if isinstance(value, list):
        return [repair_json(item) for item in value]
    if isinstance(value, dict):
        return {repair_text(key): repair_json(item) for key, item in value.items()}
    return value


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, but for tab and line end: also those that turn the direction of a text or end
a line."""


def escaped(text: str) -> str:
    """Return a text with control characters as Python writes them: a terminal would obey them."""
    return _CONTROL.sub(lambda control: repr(control[0])[1:-1], text)


def escaped_line(text: str) -> str:
    """Return a text as `escaped`, in one line."""
    return escaped(text).replace("\n", r"\n")
