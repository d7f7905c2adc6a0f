"""The tokenizer: bytes, plus one token for every word of the world. It covers any text.

Reads the word pools of `world.py` and the wording of `questions.py` and `demonstrations.py`;
`init_model.py` saves the result into the model directory, where AutoTokenizer finds it.

A word is one token together with its leading space, and an entry's id is two tokens, so that a name
or an id has the same tokens wherever it stands. Everything else falls back to bytes. It is a
Qwen2Tokenizer, because AutoTokenizer rebuilds any tokenizer found beside a Qwen2 model as one.
"""

import re
from pathlib import Path

from demonstrations import SPOKEN_WORDS
from questions import OTHER_WORDINGS, WORDINGS
from scripted import UNKNOWN
from tokenizers import AddedToken, pre_tokenizers
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

END_OF_TURN = "<|im_end|>"
PAD = "<|endoftext|>"
SPECIAL_TOKENS = (PAD, "<|im_start|>", END_OF_TURN)
"""Tokens a decoder may skip when it shows text to people."""

MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<answer>",
    "</answer>",
    '{"name":"search","arguments":{"query":"',
    '{"name":"read","arguments":{"id":"',
    '"}}',
)
"""Markup of the dialogue, one token each; kept when special tokens are skipped."""

ROLE_WORDS = ("system", "user", "assistant")
MAX_NUMBER = 40
"""Budgets up to this many calls are one token."""
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


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
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {entry: i for i, entry in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        eos_token=END_OF_TURN,
        pad_token=PAD,
        unk_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    special = [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    tokenizer.add_tokens(special, special_tokens=True)
    added = [AddedToken(t, normalized=False) for t in [*MARKERS, *vocabulary_words()]]
    tokenizer.add_tokens(added)
    tokenizer.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return tokenizer
