"""Text from outside (a tool's, an environment's) in tokens, none of which controls the dialogue.

chat_format.py makes one for a tokenizer and puts its tokens between the model's turns.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from agent_r1_service.control_tokens import MARKUP, control_pattern, spell_out

TRUNCATION_MARKER = "\n[truncated]"


def as_json(text: str) -> str:
    """Return a text as it stands in a string of JSON, without the quotes around it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class OutsideText:
    """Encodes outside text with one tokenizer.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        glue: tokens that the chat template puts between turns.
        markup: tags that mean something in a turn.
    """

    def __init__(self, tokenizer: Any, glue: Collection[int], markup: Collection[str]) -> None:
        self._backend = tokenizer.backend_tokenizer
        tokens: Mapping[int, Any] = tokenizer.added_tokens_decoder
        # A word may be a token of its own and stand in the glue ("user"); it controls nothing.
        control = {
            token_id: token.content
            for token_id, token in tokens.items()
            if token.special
            or (MARKUP.match(token.content) and token_id in glue)
            or token.content in markup
        }
        self._control = frozenset(control)
        self._pattern = control_pattern(control.values())

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; `<|im_end|>` in it is spelled out in ordinary tokens."""
        token_ids = self._encode(text)
        if self._control.isdisjoint(token_ids):
            return token_ids
        pieces = spell_out(text, self._pattern)
        token_ids = [token for piece in pieces for token in self._encode(piece)]
        if self._control.isdisjoint(token_ids):
            return token_ids
        # A normalizer may turn other characters into a control token's: spell everything out.
        token_ids = [token for character in text for token in self._encode(character)]
        return [token for token in token_ids if token not in self._control]

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

    def _encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids
