"""How rollout, and the warm start alike, spell out control tokens in texts from outside."""

from __future__ import annotations

import re
from collections.abc import Iterable

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
