"""The tokenizer: bytes, plus one token for every word of the world. It covers any text.

Reads the fixed word pools of `world.py` and the wording of `questions.py`; `init_model.py` saves
the result into the model directory, where AutoTokenizer finds it.

A word is one token together with its leading space, so an entity has the same ids in the question,
the passage, the query and the answer as long as a space precedes it: that is why answers, queries
and passages open with one. Everything else falls back to bytes. It is a Qwen2Tokenizer, because
AutoTokenizer rebuilds any tokenizer found beside a Qwen2 model as one: no merges, words as added
tokens, and text brought to Unicode form NFC before it is encoded, as Qwen2.5 does.
"""

import re
from pathlib import Path

from questions import SPOKEN_TEXT
from tokenizers import AddedToken, pre_tokenizers
from transformers import Qwen2Tokenizer
from world import CLAUSES, NAME_POOLS, YEARS

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
    '"}}',
)
"""Markup of the dialogue, one token each; kept when special tokens are skipped."""

ROLE_WORDS = ("system", "user", "assistant")
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
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {entry: i for i, entry in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        eos_token=END_OF_TURN,
        pad_token=PAD,
        unk_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    special = [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    tokenizer.add_tokens(special, special_tokens=True)
    added = [AddedToken(t, normalized=False) for t in [*MARKERS, *vocabulary_words()]]
    tokenizer.add_tokens(added)
    tokenizer.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return tokenizer
