"""The random model of the diagnosis, and what a GPU can compute at most."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.models import SHAPES as RANDOM_SHAPES
from scripts.gpu_test.parts import ROOT

EXAMPLE = ROOT / "examples" / "tiny_world"
TOKENS_OF_A_TURN = 64
QWEN = RANDOM_SHAPES["0.5b"]
TINY = {
    **QWEN,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 1024,  # more than the tokenizer has, as above
}
SHAPES: dict[str, dict[str, Any]] = {"cuda": QWEN, "cpu": TINY}
PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L40": 181,
    "A40": 150,
    "A10": 125,
    "L4": 121,
    "RTX 5090": 210,
    "RTX 4090": 165,
    "RTX 3090": 71,
}
"""Dense bfloat16 with float32 sums, by a part of the GPU's name, from NVIDIA's data sheets; the
first that fits counts."""


def make_model(folder: Path, shape: Mapping[str, Any]) -> None:
    """Write a random model in bfloat16, with the tokenizer of tiny_world.

    Of its tokens that the tokenizer lacks, so many end a turn that one in 64 sampled tokens does.
    """
    import torch
    from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "base")
    end, pad = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.pad_token_id
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen2ForCausalLM(Qwen2Config(**shape, eos_token_id=end, pad_token_id=pad))
    unused = range(len(tokenizer), shape["vocab_size"])
    ends = [end, *unused[:: len(unused) // (shape["vocab_size"] // TOKENS_OF_A_TURN)]]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def peak_flops(device: str) -> float | None:
    """Return what a GPU computes a second at most, by its name; None where it is not known."""
    return next((peak * 1e12 for name, peak in PEAK_TFLOPS.items() if name in device), None)


def flops_of_a_token(shape: Mapping[str, Any], weights: int, length: int) -> float:
    """Return what training on a token takes in a sequence of a length, forward and backward.

    Six for each weight, and 12 x layers x hidden x tokens for attention without its causal half
    (PaLM, arXiv:2204.02311, appendix B); a second forward pass for activations is no progress, and
    not counted.
    """
    attention = 12 * shape["num_hidden_layers"] * shape["hidden_size"] * length
    return 6.0 * weights + attention
