"""Memory and disk that a run will take, worked out from its configuration and the model's.

`agent-r1 check` prints it; benchmarks/estimate.py compares it with what is measured on a CPU.
Nothing is loaded: the weights are counted on a device without memory.

Dimension key: P = weights, T = tokens of a micro-batch, L = layers, H = hidden size,
I = intermediate size, Q = heads x head size, K = heads of keys x head size, V = vocabulary.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.config.run import Config
from agent_r1.learner.algorithms import is_per_token
from agent_r1.learner.config import GRADIENT_BUCKET, EngineConfig
from agent_r1.runtime.config import Dtype, LoraConfig, ModelConfig
from agent_r1.runtime.imports import quick_imports
from agent_r1.runtime.memory import GIB
from agent_r1.weights.adapters import adapter_shapes

FLOAT = 4
"""Bytes of a float32."""
ADAM = 2 * FLOAT
"""AdamW's two moments of a weight."""
MASTER = FLOAT
"""A float32 copy of a bfloat16 weight."""
LIVE = 1_000_000_000
"""Most values that ZeRO-3 keeps gathered, its `stage3_max_live_parameters`."""
CUDA, NCCL, FRAGMENTS = 1.5e9, 1e9, 0.05
"""Memory of a process on a GPU: context, kernels and workspaces; communication between several; and
the share of everything else that freed memory leaves unusable. Never measured here."""
OUTSIDE = "CUDA, NCCL"
"""The part that torch's allocator, and `engine.gpu_memory_share`, does not count."""
ENGINE = 3e9
"""Memory that an engine computes in on a GPU: context, graphs, a step's activations. Never
measured."""
PROCESS = 4e9
"""Memory of the machine that a process with a GPU takes for its libraries. Never measured."""
CPU_BUFFERS = 60e6
"""Memory that torch and oneDNN allocate for themselves at their first step on a CPU, and ZeRO
again."""
KEPT_SHARE, KEPT_LAYERS = 0.5, 2.0
"""Memory that the C library of a CPU keeps of freed activations, as was measured: a share of them,
and of what one layer keeps (docs/benchmarks.md)."""

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "vocab_size",
)
"""Keys of a model's config.json that every model has."""
LONGEST_REASON = 200
"""Letters of what transformers says of a file; more is advice for other versions of it."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model that memory depends on."""

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
    def held(self) -> int:
        """Weights, those of the adapters included."""
        return self.weights + (self.adapters or 0)

    @property
    def trained(self) -> int:
        """Weights that have a gradient."""
        return self.weights if self.adapters is None else self.adapters

    @property
    def embedding(self) -> int:
        """Weights of the largest tensor."""
        return self.vocabulary * self.hidden


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
    try:
        text, model = _without_memory(folder)
    except Exception as exc:  # a broken file may lead transformers anywhere
        why = textwrap.shorten(str(exc), LONGEST_REASON, placeholder=" ...")
        raise ValueError(
            f"model.path ({folder}) has no usable config.json: {why}; copy the model again, or "
            "name another one"
        ) from exc
    heads = text.num_attention_heads
    head = _head_size(text)
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


def _without_memory(folder: Path) -> tuple[Any, Any]:
    """Return the configuration of a model's text part, and the model on a device without memory.

    Raises:
        ValueError: its sizes are none of a model.
    """
    with quick_imports():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text = config.get_text_config()
    _check_sizes(text)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.tie_weights()
    return text, model


def _check_sizes(text: Any) -> None:
    """Refuse sizes with which transformers would build a model that no engine can run."""
    for name in SIZES:
        if (size := getattr(text, name)) < 1:
            raise ValueError(f"{name} ({size}) must be 1 or more")
    heads = text.num_attention_heads
    if getattr(text, "head_dim", None) is None and text.hidden_size % heads:
        raise ValueError(
            f"num_attention_heads ({heads}) must divide hidden_size ({text.hidden_size})"
        )
    keys = getattr(text, "num_key_value_heads", None) or heads
    if heads % keys:
        raise ValueError(f"num_key_value_heads ({keys}) must divide num_attention_heads ({heads})")


def _head_size(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def value_bytes(dtype: Dtype) -> int:
    """Return the bytes of a number."""
    return 4 if dtype == "float32" else 2


def zero_stage(config: EngineConfig, dtype: Dtype) -> int:
    """Return the stage that runs: without ZeRO, bfloat16 takes 1, for float32 master weights."""
    return max(1, config.zero_stage) if dtype == "bfloat16" else config.zero_stage


def state_parts(size: ModelSize, config: EngineConfig, dtype: Dtype, what: str) -> Iterator[Part]:
    """Yield what a trained model holds on the device of each rank.

    Source: ZeRO, arXiv:1910.02054, with gradients added up in float32; DeepSpeed's own figures
    are beside these in tests/integration/test_estimate_memory.py.
    """
    stage, count = zero_stage(config, dtype), size.trained
    whole = size.held * value_bytes(dtype) / (config.ranks if stage == 3 else 1)
    yield Part(f"{what}: weights", 0 if config.offload == "all" else whole)
    yield Part(f"{what}: gradients", count * _gradient_bytes(config, dtype))
    if config.offload == "none":
        optimizer = ADAM if stage == 0 else (MASTER + ADAM) / config.ranks
        yield Part(f"{what}: optimizer", count * optimizer)


def _gradient_bytes(config: EngineConfig, dtype: Dtype) -> float:
    """Return the bytes that a trained weight's gradient takes on each rank.

    Under stage 1, that is the whole sum, and a gradient as it comes from the backward pass or,
    with offload, this rank's part of the sum.
    """
    stage, own = zero_stage(config, dtype), value_bytes(dtype)
    part = FLOAT / config.ranks
    if stage == 0:
        return FLOAT
    if stage == 1:
        return FLOAT + (own if config.offload == "none" and dtype == "bfloat16" else part)
    return 0 if stage == 3 and config.offload != "none" else part


def offloaded_parts(
    size: ModelSize, config: EngineConfig, dtype: Dtype, what: str, *, page_locked: bool
) -> Iterator[Part]:
    """Yield what a rank keeps of a trained model in the memory of its machine.

    Args:
        size: of the model.
        config: of the engine.
        dtype: of the weights.
        what: is trained.
        page_locked: so that a GPU reads it: torch rounds such blocks up to a power of two.
    """
    if config.offload == "none":
        return
    stage, part = zero_stage(config, dtype), size.trained / config.ranks
    # Master weights and the gradients that AdamW reads; beside them, stage 3 has the sum of
    # gradients, and the others a copy of the weights on their way back.
    locked = [part * FLOAT, part * (FLOAT if stage == 3 else value_bytes(dtype))]
    if config.offload == "all":
        locked.append(size.held * value_bytes(dtype) / config.ranks)
    master = part * FLOAT
    if stage < 3:
        locked.append(master)
    yield Part(f"{what}: AdamW", part * ADAM + (master if stage == 3 else 0))
    yield Part(f"{what}: master weights, gradients, copies", sum(locked))
    if page_locked:
        rounding = sum(2 ** math.ceil(math.log2(max(1, block))) - block for block in locked)
        yield Part(f"{what}: rounding of page-locked blocks", rounding)


def bucket_parts(
    size: ModelSize, critic: ModelSize | None, config: EngineConfig, dtype: Dtype
) -> Iterator[Part]:
    """Yield what DeepSpeed computes in: gradients on their way, and weights that it gathers."""
    stage, own = zero_stage(config, dtype), value_bytes(dtype)
    models = [size] if critic is None else [size, critic]
    buckets = [min(GRADIENT_BUCKET, model.trained) for model in models]
    if stage == 0 or (stage == 1 and dtype == "bfloat16" and config.offload == "none"):
        return
    if stage < 3:
        width = FLOAT if stage == 1 else own
        yield Part("bucket of gradients", max(buckets) * width)
        return
    copy = max(buckets) if config.ranks > 1 else 0
    yield Part("buckets of gradients", (sum(buckets) + copy) * own)
    if config.ranks > 1 or config.offload == "all":
        yield Part("gathered weights", min(LIVE, max(model.held for model in models)) * own)


def cpu_buffers(config: EngineConfig, dtype: Dtype) -> Part:
    """Return what the libraries take on a CPU."""
    return Part("buffers of the libraries", CPU_BUFFERS * (2 if zero_stage(config, dtype) else 1))


def microbatch_tokens(config: Config) -> int:
    """Return the most tokens of one micro-batch: a long sequence has one of its own.

    So has a trajectory of many segments where the loss looks at whole trajectories.
    """
    learner = config.learner
    trajectory = config.max_segments * config.model.max_context
    longest = config.model.max_context if is_per_token(learner.policy_loss) else trajectory
    batch = learner.groups_per_batch * learner.group_size * trajectory
    return min(max(config.engine.max_tokens_per_microbatch, longest), batch)


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
    """Return the memory of one learner rank, reason by reason: of its GPU, or of the machine."""
    table, dtype = config.engine, config.model.dtype
    parts = list(state_parts(size, table, dtype, "policy"))
    if _has_reference(config) and table.offload != "all":
        parts.append(Part("reference: weights", _reference_bytes(config, size)))
    if critic is not None:
        parts += state_parts(critic, table, dtype, "critic")
    parts += bucket_parts(size, critic, table, dtype)
    tokens = microbatch_tokens(config)
    parts += activation_parts(size, table, config.model, tokens, on_gpu=on_gpu)
    if not on_gpu:
        kept_on_machine = host_parts(config, size, critic, page_locked=False)
        return [*parts, *kept_on_machine, cpu_buffers(table, dtype)]
    if config.learner.transport == "collective" and config.learner.collective_backend == "ipc":
        # The next version is copied before the one before is let go.
        copies = 2 * size.weights * value_bytes(dtype)
        parts.append(Part("versions for the server (ipc)", copies))
    parts.append(Part("fragments", FRAGMENTS * total(parts)))
    return [*parts, Part(OUTSIDE, CUDA + (NCCL if table.ranks > 1 else 0))]


def _has_reference(config: Config) -> bool:
    """Return whether a rank holds a reference; with adapters, it is the policy without them."""
    return config.learner.kl != "none" and config.model.lora is None


def _reference_bytes(config: Config, size: ModelSize) -> float:
    share = config.engine.ranks if config.engine.zero_stage == 3 else 1
    return size.weights * value_bytes(config.model.dtype) / share


def host_parts(
    config: Config, size: ModelSize, critic: ModelSize | None, *, page_locked: bool
) -> list[Part]:
    """Return what a rank offloads to the memory of its machine."""
    table, dtype = config.engine, config.model.dtype
    parts = list(offloaded_parts(size, table, dtype, "policy", page_locked=page_locked))
    if critic is not None:
        parts += offloaded_parts(critic, table, dtype, "critic", page_locked=page_locked)
    if _has_reference(config) and table.offload == "all":
        parts.append(Part("reference: weights", _reference_bytes(config, size)))
    return parts


def kv_bytes_per_token(size: ModelSize, dtype: Dtype) -> int:
    """Return the bytes that a token takes in the KV cache."""
    return 2 * size.layers * size.keys * value_bytes(dtype)


def rollout_parts(config: Config, size: ModelSize, gpu_bytes: float | None) -> list[Part]:
    """Return the memory of one rollout server: of one of its GPUs, or of this machine."""
    own, parts = value_bytes(config.model.dtype), config.rollout.tensor_parallel_size
    weights = Part("weights", size.weights * own / parts)
    if gpu_bytes is None:
        # vLLM keeps another copy of embedding and head, packed for its kernels.
        packed = 2 * size.vocabulary * size.hidden * own / parts
        cache = Part("KV cache (rollout.kv_cache_gib)", config.rollout.kv_cache_gib * GIB)
        return [Part("weights", weights.size + packed), cache]
    engine = ENGINE + (NCCL if parts > 1 else 0)
    left = config.rollout.gpu_memory_utilization * gpu_bytes - weights.size - engine
    return [weights, Part("KV cache (what is left)", left), Part("CUDA, graphs, steps", engine)]


def disk_parts(config: Config, size: ModelSize, critic: ModelSize | None) -> list[Part]:
    """Return the disk that a run takes at its largest."""
    learner, own = config.learner, value_bytes(config.model.dtype)
    trained = size.trained + (0 if critic is None else critic.weights)
    checkpoint = trained * (MASTER + ADAM) + size.trained * own
    # One is written before an old one is deleted.
    count = learner.keep_last + learner.keep_best + 1
    versions = 0 if learner.transport == "collective" else learner.keep_versions + 1
    return [
        Part(f"{count} checkpoints (learner.keep_last + keep_best + 1)", count * checkpoint),
        Part(f"{versions} versions of the weights", versions * size.trained * own),
    ]


def total(parts: Sequence[Part]) -> float:
    """Return the bytes of all parts."""
    return sum(part.size for part in parts)
