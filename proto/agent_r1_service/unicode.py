"""Text from outside, made sendable: half of a surrogate pair has no UTF-8, so no message holds it.

Python code makes them easily (`json.loads` of an escape, file names). The tool service repairs what
tools return, rollout what environments return and what exceptions say.
"""

from __future__ import annotations

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
