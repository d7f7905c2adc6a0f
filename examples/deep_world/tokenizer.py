"""The tokenizer: bytes, plus one token for every word of the world. It covers any text.

Reads the word pools of `world.py` and the wording of `questions.py` and `demonstrations.py`;
`init_model.py` saves the result into the model directory, where AutoTokenizer finds it.

A word is one token together with its leading space, and an entry's id is two tokens, so that a name
or an id has the same tokens wherever it stands. Everything else falls back to bytes.
"""

import re

from demonstrations import SPOKEN_WORDS
from questions import OTHER_WORDINGS, WORDINGS
from scripted import UNKNOWN
from transformers import Qwen2Tokenizer
from world import (
    FIRST_NAMES,
    ID_HEADS,
    ID_TAILS,
    LAST_NAMES,
    NUMBERS,
    RELATIONS,
    TOWNS,
    TRADES,
    YEARS,
)

from agent_r1.examples.small_model import MARKUP, ROLE_WORDS, SHORT_TEMPLATE, make_tokenizer

CALL_MARKERS = (
    '{"name":"search","arguments":{"query":"',
    '{"name":"read","arguments":{"id":"',
    '"}}',
)
"""Scaffolding of a call, one token each."""

MAX_NUMBER = 40
"""Budgets up to this many calls are one token."""


def question_words() -> set[str]:
    """Words of all wordings, and of the sentence that states the budget."""
    texts = [f" Use {UNKNOWN} calls earlier later"]
    for wording in (*WORDINGS, *OTHER_WORDINGS):
        texts.append(wording.chain.format(start="", path=""))
        texts.append(wording.comparison.format(order="", a="", b=""))
    return set(re.findall(r"[A-Za-z]+", " ".join(texts)))


def vocabulary_words() -> list[str]:
    """All texts that get a token of their own, but for markup."""
    words = {*FIRST_NAMES, *LAST_NAMES, *ID_HEADS, *NUMBERS, *RELATIONS, *TOWNS, *TRADES, *YEARS}
    words |= question_words() | set(re.findall(r"\w+", SPOKEN_WORDS))
    words |= {str(number) for number in range(1, MAX_NUMBER + 1)}
    return [*sorted(f" {word}" for word in words), *ID_TAILS, *ROLE_WORDS]


def build_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer; its length is the model's vocabulary size, without unused ids."""
    return make_tokenizer([*MARKUP, *CALL_MARKERS, *vocabulary_words()], SHORT_TEMPLATE, 2048)
