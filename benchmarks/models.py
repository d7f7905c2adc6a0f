"""Random models of chosen shapes, their number of weights, and what one thread can do at best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.runtime.files.writing import replace_directory
from benchmarks.harness import OUT, ROOT

BASE = ROOT / "examples" / "tiny_world" / "base"
_90M = {
    "hidden_size": 768,
    "num_hidden_layers": 14,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "10m": {
        "hidden_size": 320,
        "num_hidden_layers": 8,
        "intermediate_size": 880,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
    },
    "90m": _90M,
    "90m_long": _90M | {"max_position_embeddings": 32768},
    # For ratios, in which layers count alike.
    "90m_2": _90M | {"num_hidden_layers": 2, "max_position_embeddings": 8192},
    "0.5b": {  # Qwen2.5-0.5B
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
}
FLOAT_BYTES = 4
COPY_BYTES = 2**28  # far more than the caches hold
GEMM_SIZE = 1536
TRIES = 7


def random_model(name: str, mean_turn_tokens: float = 1e9) -> Path:
    """Return the folder of a random model with the tiny base's tokenizer; it is written once.

    Args:
        name: In SHAPES.
        mean_turn_tokens: At any token, a turn ends with a probability of about 1 in so many.
    """
    folder = OUT / f"model_{name}_{mean_turn_tokens:g}"
    if not folder.exists():
        with replace_directory(folder) as partial:
            _write_model(partial, SHAPES[name], mean_turn_tokens)
    return folder


def _write_model(folder: Path, shape: Mapping[str, Any], mean_turn_tokens: float) -> None:
    """Write a model in which feature 0 alone feeds the output row of the end token.

    The feature is 1 in every embedding, and no layer writes to it.
    """
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    usual = {"max_position_embeddings": 1024, "tie_word_embeddings": False}
    config = Qwen2Config(**{**usual, "vocab_size": len(tokenizer), **shape}, eos_token_id=end)
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(config)
    if not config.tie_word_embeddings:
        with torch.no_grad():
            _end_turns_by_chance(model, end, mean_turn_tokens)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _end_turns_by_chance(model: Any, end: int, mean_turn_tokens: float) -> None:
    import torch

    model.model.embed_tokens.weight[:, 0] = 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    head = model.lm_head.weight
    head[:, 0] = 0.0
    head[end] = 0.0
    tokens = torch.randint(3, model.config.vocab_size, (8, 64))
    hidden = model.model(tokens).last_hidden_state.flatten(0, 1)
    others = torch.cat([head[:end], head[end + 1 :]])
    wanted = torch.logsumexp(hidden @ others.T, -1).mean() - math.log(mean_turn_tokens - 1)
    head[end, 0] = wanted / hidden[:, 0].mean()


@dataclass(frozen=True)
class Weights:
    """How many weights a model has, by how often they are multiplied."""

    all: int
    layers: int
    """Multiplied for every token."""
    head: int
    """Of the output layer: multiplied for tokens that are sampled or trained."""


def count_weights(model: Path) -> Weights:
    """Count the weights of a model directory."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for path in model.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            for name in file.offset_keys():
                sizes[name] = math.prod(file.get_slice(name).get_shape())
    rows = sum(size for name, size in sizes.items() if "embed_tokens" in name)
    head = sum(size for name, size in sizes.items() if name.startswith("lm_head"))
    total = sum(sizes.values())
    return Weights(total, total - rows - head, head or rows)


@dataclass(frozen=True)
class Limits:
    """Best speeds of one thread of this machine, in float32."""

    bytes_per_s: float
    """Bytes read and written by copying a large tensor."""
    flops_per_s: float
    """Floating-point operations of a product of two large square matrices."""


def measure_limits() -> Limits:
    """Measure both limits; takes a second or two."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source = torch.ones(COPY_BYTES // FLOAT_BYTES)
        target = torch.empty_like(source)
        copy_s = _least_cpu_s(lambda: target.copy_(source))
        left, right = (torch.rand(GEMM_SIZE, GEMM_SIZE) for _ in range(2))
        # PyTorch's own product is MKL's, which takes no AVX-512 on processors of AMD.
        one_dnn = torch.ops.mkldnn._linear_pointwise
        gemm_s = min(
            _least_cpu_s(lambda: torch.mm(left, right)),
            _least_cpu_s(lambda: one_dnn(left, right, None, "none", [], "")),
        )
    finally:
        torch.set_num_threads(before)
    return Limits(2 * COPY_BYTES / copy_s, 2 * GEMM_SIZE**3 / gemm_s)


def _least_cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU seconds of the best of several tries: other work only makes one slower."""
    tries: list[float] = []
    for _ in range(TRIES):
        started = time.process_time()
        work()
        tries.append(time.process_time() - started)
    return min(tries)
