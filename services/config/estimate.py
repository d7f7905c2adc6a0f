"""Memory and disk that a run will take, worked out from its configuration and the model's.

`agent-r1 estimate` prints it; scripts/bench_estimate.py compares it with what is measured on a CPU.
Nothing is loaded: the weights are counted on a device without memory.

Dimension key: P = weights, T = tokens of a micro-batch, L = layers, H = hidden size,
I = intermediate size, Q = heads x head size, K = heads of keys x head size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.config.run import Config
from agent_r1.learner.algorithms import is_per_token
from agent_r1.learner.config import EngineConfig
from agent_r1_service.config import Dtype, LoraConfig, ModelConfig
from agent_r1_service.imports import quick_imports
from agent_r1_service.memory import GIB
from agent_r1_service.weights.adapters import adapter_shapes

FLOAT = 4
"""Bytes of a float32."""
ADAM = 2 * FLOAT
"""AdamW's two moments of a weight."""
MASTER = FLOAT
"""A float32 copy of a bfloat16 weight."""
GPU_OVERHEAD = 4e9
"""CUDA, NCCL and fragments of freed memory on a GPU; never measured here."""
CPU_BUFFERS = 60e6
"""What torch, oneDNN and DeepSpeed allocate for themselves at their first step on a CPU."""
KEPT_SHARE, KEPT_LAYERS = 0.5, 2.0
"""What the C library of a CPU keeps of freed activations, as was measured: a share of them, and of
what one layer keeps (docs/benchmarks.md)."""


@dataclass(frozen=True)
class ModelSize:
    """What memory depends on."""

    weights: int
    """P"""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    queries: int
    """Q"""
    keys: int
    """K"""
    vocabulary: int
    tied: bool
    adapters: int | None = None
    """Weights of the adapters, where they alone are trained."""

    @property
    def trained(self) -> int:
        """Weights that have a gradient."""
        return self.weights if self.adapters is None else self.adapters


@dataclass(frozen=True)
class Part:
    """One reason for memory or disk."""

    name: str
    size: float
    """Bytes."""


def read_model_size(folder: Path, lora: LoraConfig | None = None) -> ModelSize:
    """Count the weights of the model in a folder, and of its adapters, without loading them.

    Raises:
        ValueError: it has no usable config.json, or the adapters do not fit it.
    """
    with quick_imports():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError) as exc:
        raise ValueError(f"model.path ({folder}) has no usable config.json: {exc}") from exc
    model.tie_weights()
    text = config.get_text_config()
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    adapters = None
    if lora is not None:
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        adapters = sum(rows * columns for rows, columns in adapter_shapes(shapes, lora).values())
    return ModelSize(
        weights=sum(parameter.numel() for parameter in model.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        heads=heads,
        queries=heads * head,
        keys=(getattr(text, "num_key_value_heads", None) or heads) * head,
        vocabulary=text.vocab_size,
        tied=bool(text.tie_word_embeddings),
        adapters=adapters,
    )


def value_bytes(dtype: Dtype) -> int:
    """Return the bytes of a number."""
    return 4 if dtype == "float32" else 2


def state_parts(size: ModelSize, config: EngineConfig, dtype: Dtype, what: str) -> Iterator[Part]:
    """Yield what a trained model holds on each rank: weights, gradients and optimizer.

    Source: ZeRO, arXiv:1910.02054, with gradients added up in float32.
    """
    count, ranks = size.trained, config.ranks
    # Without ZeRO, bfloat16 is trained as stage 1, for float32 master weights.
    stage = max(1, config.zero_stage) if dtype == "bfloat16" else config.zero_stage
    own = value_bytes(dtype)
    held = size.weights + (size.adapters or 0)
    yield Part(f"{what}: weights", held * own / (ranks if stage == 3 else 1))
    if stage == 0:
        yield Part(f"{what}: gradients", count * FLOAT)
        yield Part(f"{what}: AdamW", count * ADAM)
        return
    # Gradients as they come from the backward pass, and their sum, which stages 2 and 3 divide.
    kept = count * FLOAT / (1 if stage == 1 else ranks)
    yield Part(f"{what}: gradients", kept + (count * own if stage == 1 else 0))
    if config.offload == "none":
        yield Part(f"{what}: master weights and AdamW", count * (MASTER + ADAM) / ranks)


def microbatch_tokens(config: Config) -> int:
    """Return the most tokens of one micro-batch: a long sequence has one of its own.

    So has a trajectory of many segments where the loss looks at whole trajectories.
    """
    learner = config.learner
    trajectory = config.max_segments * config.model.max_context
    longest = config.model.max_context if is_per_token(learner.policy_loss) else trajectory
    batch = learner.groups_per_batch * learner.group_size * trajectory
    return min(max(learner.max_tokens_per_microbatch, longest), batch)


def activation_parts(
    size: ModelSize, config: EngineConfig, model: ModelConfig, tokens: int, *, on_gpu: bool
) -> Iterator[Part]:
    """Yield what a micro-batch keeps between its forward and its backward pass."""
    own = value_bytes(model.dtype)
    # What autograd keeps of a token in a layer: around two norms, in the MLP, and in attention.
    floats = 6 * size.hidden + 4 * size.intermediate + 5 * size.queries
    if model.attention == "eager":
        floats += 2 * size.heads * model.max_context
    layer = tokens * own * floats
    if config.activation_checkpointing:
        kept = size.layers * tokens * own * size.hidden + layer
    else:
        kept = size.layers * layer
    yield Part("activations", kept)
    chunk = min(config.logprob_chunk_tokens, tokens)
    head = size.hidden * (2 if size.tied else 1) if size.adapters is None else 0
    # Logits, log-probabilities, probabilities and two products of them; the head's gradient.
    logits = FLOAT * size.vocabulary * (5 * chunk + head)
    yield Part("logits", logits)
    if not on_gpu:
        yield Part("freed, not given back", KEPT_SHARE * (kept + logits) + KEPT_LAYERS * layer)


def learner_parts(
    config: Config, size: ModelSize, critic: ModelSize | None, *, on_gpu: bool
) -> list[Part]:
    """Return the memory of one learner rank, reason by reason."""
    table, dtype = config.learner, config.model.dtype
    parts = list(state_parts(size, table, dtype, "policy"))
    # With adapters, the reference is the policy without them.
    if config.learner.kl != "none" and config.model.lora is None:
        share = table.ranks if table.zero_stage == 3 else 1
        parts.append(Part("reference: weights", size.weights * value_bytes(dtype) / share))
    if critic is not None:
        parts += state_parts(critic, table, dtype, "critic")
    tokens = microbatch_tokens(config)
    parts += activation_parts(size, table, config.model, tokens, on_gpu=on_gpu)
    if on_gpu:
        parts.append(Part("CUDA, NCCL, fragments", GPU_OVERHEAD))
    else:
        parts.append(Part("buffers of the libraries", CPU_BUFFERS))
    return parts


def kv_bytes_per_token(size: ModelSize, dtype: Dtype) -> int:
    """Return the bytes that a token takes in the KV cache."""
    return 2 * size.layers * size.keys * value_bytes(dtype)


def rollout_parts(config: Config, size: ModelSize, gpu_bytes: float | None) -> list[Part]:
    """Return the memory of one rollout server: of one of its GPUs, or of this machine."""
    own, parts = value_bytes(config.model.dtype), config.rollout.tensor_parallel_size
    weights = Part("weights", size.weights * own / parts)
    if gpu_bytes is None:
        # On a CPU, the head is a tensor of its own where embeddings are tied.
        own_head = size.tied and config.model.lora is None
        head = size.vocabulary * size.hidden * own if own_head else 0
        cache = Part("KV cache (rollout.kv_cache_gib)", config.rollout.kv_cache_gib * GIB)
        return [Part("weights", weights.size + head), cache]
    left = config.rollout.gpu_memory_utilization * gpu_bytes - weights.size - GPU_OVERHEAD
    return [weights, Part("KV cache (what is left)", left), Part("CUDA, NCCL", GPU_OVERHEAD)]


def disk_parts(config: Config, size: ModelSize, critic: ModelSize | None) -> list[Part]:
    """Return the disk that a run takes at its largest."""
    learner, own = config.learner, value_bytes(config.model.dtype)
    trained = size.trained + (0 if critic is None else critic.weights)
    checkpoint = trained * (MASTER + ADAM) + size.trained * own
    # One is written before an old one is deleted.
    count = learner.keep_last + learner.keep_best + 1
    versions = learner.keep_versions + 1
    return [
        Part(f"{count} checkpoints (learner.keep_last + keep_best + 1)", count * checkpoint),
        Part(f"{versions} versions of the weights", versions * size.trained * own),
    ]


def total(parts: Sequence[Part]) -> float:
    """Return the bytes of all parts."""
    return sum(part.size for part in parts)
