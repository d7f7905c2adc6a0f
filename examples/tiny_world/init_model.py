"""Write the initialized model directory that the warm start trains: stock Qwen2, seeded.

    python examples/tiny_world/init_model.py --out runs/tiny_init

writes config.json, generation_config.json, model.safetensors and the tokenizer files. The
initialization is not the usual small noise. It is mimetic (after Trockman and Kolter,
arXiv:2305.09828): queries and keys start alike, values and outputs start as each other's
transpose, so a later-layer head starts out attending to equal tokens and copying what it sees.
With `--previous-token-heads N` it goes further and builds N first-layer heads that look at the
previous token, and later-layer heads whose keys read what those heads wrote: an induction circuit,
laid down by hand. The architecture stays stock Qwen2, and training is free to change all of it.
"""

import argparse
import math
from pathlib import Path

import torch
from tokenizer import END_OF_TURN, build_tokenizer
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

HIDDEN, LAYERS, HEADS, FFN = 128, 3, 4, 256
EMBED_STD = 0.5
HEAD_SCALE = 0.1
PREVIOUS_BIAS = 6.0
PREVIOUS_FREQUENCIES = 5


def make_config(vocab_size: int, pad_id: int, eos_id: int) -> Qwen2Config:
    """Configuration with stock keys only; the vocabulary has no unused ids."""
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=pad_id,
        bos_token_id=None,
        eos_token_id=eos_id,
        dtype="float32",
    )


@torch.no_grad()
def initialize(model: Qwen2ForCausalLM, previous_token_heads: int) -> None:
    """Set all weights in place from torch's global generator."""
    hidden = model.config.hidden_size
    head_dim = hidden // model.config.num_attention_heads
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
    if previous_token_heads:
        _add_previous_token_heads(model, previous_token_heads, head_dim)


def _add_previous_token_heads(model: Qwen2ForCausalLM, count: int, head_dim: int) -> None:
    """Point first-layer heads one token back, and let later keys read what those heads wrote."""
    rows = slice(0, count * head_dim)
    first = model.model.layers[0].self_attn
    half = head_dim // 2
    theta = model.config.rope_parameters["rope_theta"]
    for projection in (first.q_proj, first.k_proj):
        projection.weight[rows].mul_(0.1)
    for head in range(count):
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


def main() -> None:
    """Parse the command line and write the model directory."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--previous-token-heads", type=int, default=2, choices=range(HEADS + 1))
    arguments = parser.parse_args()
    tokenizer = build_tokenizer()
    eos_id = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    torch.manual_seed(arguments.seed)
    model = Qwen2ForCausalLM(make_config(len(tokenizer), tokenizer.pad_token_id, eos_id))
    initialize(model, arguments.previous_token_heads)
    model.generation_config = GenerationConfig(
        eos_token_id=eos_id, pad_token_id=tokenizer.pad_token_id
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
