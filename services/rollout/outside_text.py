"""Text from outside (a task's, a tool's, an environment's) in tokens that control no dialogue.

chat_format.py makes one for a tokenizer, puts its tokens between the model's turns, and cuts the
texts of prompts as it says.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from agent_r1_service.control_tokens import ControlTokens

logger = logging.getLogger(__name__)

Origin = Literal["prompt", "tools", "reply"]
"""Where text from outside stands: in a task, in what tools say of themselves, behind a turn."""
ORIGINS: tuple[Origin, ...] = ("prompt", "tools", "reply")
TRUNCATION_MARKER = "\n[truncated]"


def as_json(text: str) -> str:
    """Return a text as it stands in a string of JSON, without the quotes around it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class OutsideText(ControlTokens):
    """Encodes outside text with one tokenizer."""

    def encode_limited(
        self, text: str, *, max_chars: int, max_tokens: int | None, in_json: bool = False
    ) -> tuple[str, list[int]]:
        """Encode a text, cut to both limits with a visible marker where it was cut.

        Args:
            text: what is encoded.
            max_chars: most characters of it.
            max_tokens: most tokens; None is no limit.
            in_json: it stands in a string of JSON.

        Returns:
            The text as it was encoded, and its tokens.
        """

        def written(part: str) -> str:
            return as_json(part) if in_json else part

        kept = text
        if len(kept) > max_chars:
            kept = kept[: max(max_chars - len(TRUNCATION_MARKER), 0)] + TRUNCATION_MARKER
        shown = written(kept)
        token_ids = self.encode(shown)
        if max_tokens is None or len(token_ids) <= max_tokens:
            return shown, token_ids
        marker = written(TRUNCATION_MARKER)
        marker_ids = self.encode(marker)
        budget = max(max_tokens - len(marker_ids), 0)
        body = written(text[: len(kept)])
        while True:
            offsets = self._backend.encode(body, add_special_tokens=False).offsets
            body = body[: offsets[budget][0]] if len(offsets) > budget else body[:-1]
            if in_json:
                body = body.rstrip("\\")  # half of an escape
            body_ids = self.encode(body)
            if len(body_ids) + len(marker_ids) <= max_tokens:
                return body + marker, body_ids + marker_ids
            if not body:
                return marker, marker_ids[:max_tokens]


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
