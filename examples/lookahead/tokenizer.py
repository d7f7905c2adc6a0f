"""The tokenizer: bytes, plus one token for every word of the world. It covers any text.

`init_model.py` saves it into the model directory, where AutoTokenizer finds it. A word is one token
together with its leading space, and a page's id is three, so that a name or an id has the same
tokens wherever it stands.
"""

import re

from policies import NOTHING
from residents import (
    BOOKS,
    FIRST_NAMES,
    LAST_NAMES,
    PAGE_HEADS,
    PAGE_TAILS,
    SPEAKERS,
    TOPICS,
    TOWNS,
    WORDINGS,
)
from transformers import Qwen2Tokenizer

from agent_r1.examples.small_model import MARKUP, ROLE_WORDS, SHORT_TEMPLATE, make_tokenizer

CALL_MARKERS = (
    '{"name":"rumour","arguments":{"query":"',
    '{"name":"register","arguments":{"book":"',
    '","query":"',
    '{"name":"page","arguments":{"id":"',
    '"}}',
)
"""Scaffolding of a call, one token each."""
MAX_NUMBER = 9
"""Numbers of calls up to this one are one token."""


def spoken_words() -> set[str]:
    """Words of all wordings, of the sentence about calls, and of answers."""
    wordings = (wording.format(name="", topic="") for wording in WORDINGS)
    text = " ".join([*wordings, "Use call calls says see page", NOTHING])
    return set(re.findall(r"[A-Za-z]+", text))


def vocabulary() -> list[str]:
    """All texts that get a token of their own, but for markup."""
    words = {*FIRST_NAMES, *LAST_NAMES, *TOWNS, *TOPICS, *BOOKS, *SPEAKERS, *PAGE_HEADS}
    words |= spoken_words() | {str(number) for number in range(1, MAX_NUMBER + 1)}
    return [*sorted(f" {word}" for word in words), *PAGE_TAILS, *ROLE_WORDS]


def build_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer; its length is the model's vocabulary size, without unused ids."""
    return make_tokenizer([*MARKUP, *CALL_MARKERS, *vocabulary()], SHORT_TEMPLATE, 1024)
