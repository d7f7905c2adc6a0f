"""How rollout, and the warm start alike, spell out control tokens in texts from outside."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, cast

MARKUP = re.compile(r"\s*[<\[].*[>\]]\s*\Z", re.DOTALL)
"""What looks like a control token."""


def control_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return what matches the texts of control tokens, the longest one wherever several do."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def spell_out(text: str, control: re.Pattern[str]) -> list[str]:
    """Cut a text after the first letter of every control token, so that none is left in a piece."""
    pieces: list[str] = []
    last = 0
    for match in control.finditer(text):
        pieces += [text[last : match.start() + 1], text[match.start() + 1 : match.end()]]
        last = match.end()
    return [piece for piece in (*pieces, text[last:]) if piece]


def unused_word(word: str, texts: Iterable[str]) -> str:
    """Return the word, made longer until no text has it: it can stand for something in them."""
    whole = "\n".join(texts)
    while word in whole:
        word += "x"
    return word


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value in which every text is changed, names of keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        found = cast(dict[str, Any], value)
        return {change(key): map_texts(item, change) for key, item in found.items()}
    if isinstance(value, list):
        return [map_texts(item, change) for item in cast(list[Any], value)]
    return value
