"""The tokenizer: bytes, plus one token for every word of the world. It covers any text.

Reads the fixed word pools of `world.py` and the wording of `questions.py`; `init_model.py` saves
the result into the model directory, where AutoTokenizer finds it.

A word is one token together with its leading space, so an entity has the same ids in the question,
the passage, the query and the answer as long as a space precedes it: that is why answers, queries
and passages open with one. Everything else falls back to bytes. It is built by `small_model.py`,
one folder up.
"""

import re
from pathlib import Path

from questions import SPOKEN_TEXT
from transformers import Qwen2Tokenizer
from world import CLAUSES, NAME_POOLS, YEARS

from agent_r1.examples.small_model import MARKUP, ROLE_WORDS, make_tokenizer

CALL_MARKERS = ('{"name":"search","arguments":{"query":"', '"}}')
"""Scaffolding of a call, one token each."""
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def vocabulary_words() -> list[str]:
    """All texts that get a token of their own: words with a leading space, and opening words."""
    words: set[str] = set(YEARS)
    for first, second in NAME_POOLS.values():
        words.update(first, second)
    for clauses in CLAUSES.values():
        for clause in clauses:
            words.update(re.findall(r"[A-Za-z]+", clause))
    words.update(re.findall(r"[A-Za-z]+", SPOKEN_TEXT))
    spaced = sorted(f" {word}" for word in words)
    opening = sorted(set(re.findall(r"^[A-Z][a-z]+", SPOKEN_TEXT, re.MULTILINE)))
    return [*spaced, *opening, *ROLE_WORDS]


def build_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer; its length is the model's vocabulary size, without unused ids."""
    return make_tokenizer([*MARKUP, *CALL_MARKERS, *vocabulary_words()], CHAT_TEMPLATE, 4096)
