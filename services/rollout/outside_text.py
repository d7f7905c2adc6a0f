"""Control tokens in text from outside (a task's, a tool's, an environment's): where, and how many.

chat_format.py spells them out (`ControlTokens`) and notes them here; metrics.py shows the counts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from agent_r1.runtime.control_tokens import TRUNCATION_MARKER

__all__ = ["ORIGINS", "TRUNCATION_MARKER", "Origin", "SpelledOut"]

logger = logging.getLogger(__name__)

Origin = Literal["prompt", "tools", "reply"]
"""Where text from outside stands: in a task, in what tools say of themselves, behind a turn."""
ORIGINS: tuple[Origin, ...] = ("prompt", "tools", "reply")


class SpelledOut:
    """Counts the control tokens that were spelled out, and logs the first of every origin."""

    def __init__(self) -> None:
        self.counts: Counter[Origin] = Counter(dict.fromkeys(ORIGINS, 0))

    def note(self, origin: Origin, tokens: Sequence[str]) -> None:
        """Count what a text held."""
        if tokens and not self.counts[origin]:
            logger.warning(
                "control tokens in text from outside are spelled out origin=%s tokens=%s (further "
                "ones are only counted)",
                origin,
                ", ".join(map(repr, sorted(set(tokens)))),
            )
        self.counts[origin] += len(tokens)
