"""The tokenizer: bytes, plus one token for every number and every word of the problems.

`init_model.py` saves it into the model directory, where AutoTokenizer finds it. A number is one
token without a space, so that it is the same in the problem, a calculation and its result; the word
before it therefore has the space at its end.
"""

import re

from problems import COMBINATIONS, MAX_VALUE, NAMES, OPERATIONS, THINGS
from transformers import Qwen2Tokenizer

from agent_r1.examples.small_model import MARKUP, ROLE_WORDS, SHORT_TEMPLATE, make_tokenizer

CALL_MARKERS = ('{"name":"calculator","arguments":{"expression":"', '"}}')
"""Scaffolding of a call, one token each."""


def clause_tokens() -> list[str]:
    """The clauses, up to where a number stands."""
    return [f" {operation.text.replace('{}', '')}" for operation in OPERATIONS]


def vocabulary() -> list[str]:
    """All texts that get a token of their own, but for markup."""
    words = {*NAMES, *THINGS, *COMBINATIONS, *re.findall(r"\w+", "How many done")}
    numbers = map(str, range(MAX_VALUE + 1))
    return [" has ", *clause_tokens(), *sorted(f" {word}" for word in words), *numbers, *ROLE_WORDS]


def build_tokenizer() -> Qwen2Tokenizer:
    """Build the tokenizer; its length is the model's vocabulary size, without unused ids."""
    return make_tokenizer([*MARKUP, *CALL_MARKERS, *vocabulary()], SHORT_TEMPLATE, 1024)
