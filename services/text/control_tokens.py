"""Control tokens in texts from outside (a task's, a tool's): spelled out, and counted.

chat_format.py --texts--> `ControlTokens` --pieces, tokens-->; `SpelledOut` counts them for the
metrics of rollout. The warm start and the measuring of prompts spell them out alike.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

logger = logging.getLogger(__name__)

MARKUP = re.compile(r"\s*[<\[].*[>\]]\s*\Z", re.DOTALL)
"""Pattern of what looks like a control token."""
TRUNCATION_MARKER = "\n[truncated]"


def as_json(text: str) -> str:
    """Return a text as it stands in a string of JSON, without the quotes around it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


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


def is_control(token: str, *, special: bool, in_glue: bool, markup: Collection[str]) -> bool:
    """Say whether an added token of a tokenizer controls something.

    Args:
        token: its text.
        special: the tokenizer calls it special.
        in_glue: the chat template writes it.
        markup: tags that mean something in a turn.
    """
    # A word may be a token of its own and stand in the glue ("user"); it controls nothing.
    return special or token in markup or (in_glue and MARKUP.match(token) is not None)


class ControlTokens:
    """The control tokens of one tokenizer, and texts in tokens that are none of them.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        glue: tokens that the chat template puts between turns.
        markup: tags that mean something in a turn.
        spared: tokens that stay what they are, since the text is a turn of the model.
    """

    def __init__(
        self,
        tokenizer: Any,
        glue: Collection[int],
        markup: Collection[str],
        spared: Collection[str] = (),
    ) -> None:
        self._backend = tokenizer.backend_tokenizer
        tokens: Mapping[int, Any] = tokenizer.added_tokens_decoder
        control = {
            token_id: token.content
            for token_id, token in tokens.items()
            if token.content not in spared
            and is_control(
                token.content, special=token.special, in_glue=token_id in glue, markup=markup
            )
        }
        self._control = frozenset(control)
        self._pattern = control_pattern(control.values())

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; `<|im_end|>` in it is spelled out in ordinary tokens."""
        token_ids = self._encode(text)
        if self._control.isdisjoint(token_ids):
            return token_ids
        return [token for piece in self.pieces(text) for token in self._encode(piece)]

    def encode_limited(
        self, text: str, *, max_chars: int | None, max_tokens: int | None, in_json: bool = False
    ) -> tuple[str, list[int]]:
        """Encode a text, cut to both limits with a visible marker where it was cut.

        Args:
            text: what is encoded.
            max_chars: most characters of it; None is no limit.
            max_tokens: most tokens; None is no limit.
            in_json: it stands in a string of JSON.

        Returns:
            The text as it was encoded, and its tokens.
        """

        def written(part: str) -> str:
            return as_json(part) if in_json else part

        kept = text
        if max_chars is not None and len(kept) > max_chars:
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

    def pieces(self, text: str) -> list[str]:
        """Cut a text so that no piece, encoded alone, holds a control token; [text] if none does.

        A character that is a control token by itself is left out.
        """
        if self._has_none(text):
            return [text]
        pieces = spell_out(text, self._pattern)
        if all(map(self._has_none, pieces)):
            return pieces
        # A normalizer may turn other characters into a control token's: spell everything out.
        return list(filter(self._has_none, text))

    def control_tokens(self, text: str) -> list[str]:
        """Return the texts of control tokens that stand in a text."""
        return self._pattern.findall(text)

    def spelled_out(self, text: str) -> list[str]:
        """Return what `encode` spells out: control tokens, or what a normalizer makes one of."""
        found = self.control_tokens(text)
        if found or self._backend.normalizer is None or self._has_none(text):
            return found
        return [text]

    def _has_none(self, text: str) -> bool:
        return self._control.isdisjoint(self._encode(text))

    def _encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids


Origin = Literal["prompt", "tools", "reply"]
"""Place of text from outside: in a task, in what tools say of themselves, behind a turn."""
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
