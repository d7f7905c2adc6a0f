"""What the small base models of the examples share: tokenizer, architecture, initial weights.

Each example names its words and sizes; its `init_model.py` writes config.json,
generation_config.json, model.safetensors and the tokenizer files, which `agent-r1 sft` trains.

**Tokenizer.** Bytes, plus one token for every word and piece of markup that the example names. It
covers any text. It is a Qwen2Tokenizer, because AutoTokenizer rebuilds any tokenizer found beside
a Qwen2 model as one: no merges, words as added tokens, and text brought to Unicode form NFC before
it is encoded, as Qwen2.5 does.

**Initialization.** Not the usual small noise. It is mimetic (after Trockman and Kolter,
arXiv:2305.09828): queries and keys start alike, values and outputs start as each other's
transpose, so a later-layer head starts out attending to equal tokens and copying what it sees.
Beyond that, some first-layer heads look at the previous token, and later-layer heads have keys
that read what those heads wrote: an induction circuit, laid down by hand. The architecture stays
stock Qwen2, and training is free to change all of it.
"""

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, pre_tokenizers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

END_OF_TURN = "<|im_end|>"
PAD = "<|endoftext|>"
SPECIAL_TOKENS = (PAD, "<|im_start|>", END_OF_TURN)
"""Tokens a decoder may skip when it shows text to people."""
MARKUP = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<answer>",
    "</answer>",
)
"""Markup of the dialogue, one token each; kept when special tokens are skipped."""
ROLE_WORDS = ("system", "user", "assistant")
SHORT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"""A chat template with little markup around the messages."""

EMBED_STD = 0.5
HEAD_SCALE = 0.1
PREVIOUS_TOKEN_HEADS = 2
PREVIOUS_BIAS = 6.0
PREVIOUS_FREQUENCIES = 5


@dataclass(frozen=True)
class Sizes:
    """Sizes of a stock Qwen2 model; the vocabulary's is the tokenizer's."""

    hidden: int
    layers: int
    heads: int
    ffn: int


def make_tokenizer(
    entries: Iterable[str | AddedToken], chat_template: Path, max_length: int
) -> Qwen2Tokenizer:
    """Build a tokenizer; its length is the model's vocabulary size, without unused ids.

    Args:
        entries: texts that get a token of their own, beside the special tokens and the bytes.
        chat_template: Jinja file.
        max_length: tokens of the longest text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {entry: i for i, entry in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        eos_token=END_OF_TURN,
        pad_token=PAD,
        unk_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
    special = [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    tokenizer.add_tokens(special, special_tokens=True)
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) if isinstance(t, str) else t for t in entries]
    )
    tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    return tokenizer


def make_config(sizes: Sizes, vocab_size: int, pad_id: int, eos_id: int) -> Qwen2Config:
    """Configuration with stock keys only; the vocabulary has no unused ids."""
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=pad_id,
        bos_token_id=None,
        eos_token_id=eos_id,
        dtype="float32",
    )


@torch.no_grad()
def initialize(model: Qwen2ForCausalLM) -> None:
    """Set all weights in place from torch's global generator."""
    hidden = model.config.hidden_size
    embed = model.model.embed_tokens.weight
    embed.normal_(std=EMBED_STD)
    model.lm_head.weight.copy_(HEAD_SCALE * embed)
    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.q_proj.weight.normal_(std=hidden**-0.5)
        attention.v_proj.weight.normal_(std=hidden**-0.5)
        if i >= 1:
            attention.k_proj.weight.copy_(attention.q_proj.weight)
            attention.o_proj.weight.copy_(attention.v_proj.weight.T)
        layer.mlp.down_proj.weight.mul_(0.5)
    _add_previous_token_heads(model, hidden // model.config.num_attention_heads)


def _add_previous_token_heads(model: Qwen2ForCausalLM, head_dim: int) -> None:
    """Point first-layer heads one token back, and let later keys read what those heads wrote."""
    rows = slice(0, PREVIOUS_TOKEN_HEADS * head_dim)
    first = model.model.layers[0].self_attn
    half = head_dim // 2
    theta = model.config.rope_parameters["rope_theta"]
    for projection in (first.q_proj, first.k_proj):
        projection.weight[rows].mul_(0.1)
    for head in range(PREVIOUS_TOKEN_HEADS):
        for j in range(PREVIOUS_FREQUENCIES):
            angle = theta ** (-j / half)
            at = head * head_dim + j
            first.k_proj.bias[at] = PREVIOUS_BIAS
            # Rotary positions turn this query so that it meets the key exactly one token back.
            first.q_proj.bias[at] = PREVIOUS_BIAS * math.cos(angle)
            first.q_proj.bias[at + half] = -PREVIOUS_BIAS * math.sin(angle)
    written = first.o_proj.weight[:, rows] @ first.v_proj.weight[rows]
    for layer in model.model.layers[1:]:
        attention = layer.self_attn
        attention.k_proj.weight[rows] = attention.q_proj.weight[rows] @ written.T


def write_model(out: Path, tokenizer: Qwen2Tokenizer, sizes: Sizes, seed: int) -> None:
    """Write an initialized model directory."""
    eos_id, pad_id = tokenizer.convert_tokens_to_ids(END_OF_TURN), tokenizer.pad_token_id
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(make_config(sizes, len(tokenizer), pad_id, eos_id))
    initialize(model)
    model.generation_config = GenerationConfig(eos_token_id=eos_id, pad_token_id=pad_id)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(description: str, build_tokenizer: Callable[[], Qwen2Tokenizer], sizes: Sizes) -> None:
    """Parse the command line of an example's `init_model.py` and write the model directory."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    arguments = parser.parse_args()
    write_model(arguments.out, build_tokenizer(), sizes, arguments.seed)
