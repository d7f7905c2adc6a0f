"""The tokenizer: a byte-level vocabulary of whole words that covers any text.

Reads the fixed word pools of `world.py` and the wording of `questions.py`; `init_model.py` saves
the result into the model directory, where AutoTokenizer finds it.

Every word of the world is one token (with its leading space, so an entity has the same ids in the
question, the passage, the query and the answer as long as a space precedes it: that is why
answers, queries and passages open with one). Everything else falls back to bytes, so decoding
gives back the exact text, whatever it was.
"""

import json
import re
from pathlib import Path

from questions import SPOKEN_TEXT
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from world import CLAUSES, NAME_POOLS, YEARS

END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", END_OF_TURN)
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
    """All words that get a token of their own, sorted, without a leading space."""
    words: set[str] = set(YEARS)
    for first, second in NAME_POOLS.values():
        words.update(first, second)
    for clauses in CLAUSES.values():
        for clause in clauses:
            words.update(re.findall(r"[A-Za-z]+", clause))
    words.update(re.findall(r"[A-Za-z]+", SPOKEN_TEXT))
    return sorted(word for word in words if len(word) > 1)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer; its length is the model's vocabulary size, without unused ids."""
    entries = [*SPECIAL_TOKENS, *MARKERS]
    entries += sorted(pre_tokenizers.ByteLevel.alphabet())
    entries += list(ROLE_WORDS)
    # U+0120 is what the byte-level alphabet writes for a space.
    entries += [f"\u0120{word}" for word in vocabulary_words()]
    entries += sorted({w for w in re.findall(r"(?:^|\n)([A-Z][a-z]+)", SPOKEN_TEXT)})
    vocab = {entry: i for i, entry in enumerate(dict.fromkeys(entries))}
    # Without merges, `ignore_merges` makes a word one token if it is in the vocabulary, else bytes.
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(t, normalized=False) for t in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TURN,
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def call_text(query: str) -> str:
    """The tool call for one search, compact Hermes JSON (`MARKERS` hold its scaffolding)."""
    arguments = {"name": "search", "arguments": {"query": query}}
    return f"<tool_call>{json.dumps(arguments, separators=(',', ':'))}</tool_call>"
