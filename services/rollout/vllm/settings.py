"""Settings of the engine, and what policy.py checks before it imports vLLM.

Reads the model directory and the machine's memory; sets the environment variables that vLLM and
OpenMP read once, at import. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

from agent_r1.rollout.config import RolloutConfig
from agent_r1.rollout.policy import PolicyOutOfMemoryError, PolicySetupError
from agent_r1.runtime.config import ModelConfig
from agent_r1.runtime.files.hub import HubError, model_folder
from agent_r1.runtime.memory import GIB, free_memory_bytes
from agent_r1.text.chat_template import read_end_tokens
from agent_r1.weights.layout import (
    ModelLayout,
    adapter_layout,
    read_model_layout,
)

# Of vLLM's attention kernels for the CPU; importing them here to ask would take seconds.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
PLUGIN = "agent_r1_weight_transfer"
ModelRunner = Literal["v1", "v2"]
"""The two parts of vLLM that run a model and sample from it."""
GPU_MODEL_RUNNER: ModelRunner = "v2"
"""Model runner that vLLM itself takes on a GPU, and with which our tests run as a GPU has it:
docs/gpu.md."""
OUT_OF_MEMORY_REMEDY = (
    "lower, in this order: rollout.max_concurrent, rollout.kv_cache_gib "
    "(rollout.gpu_memory_utilization on a GPU), rollout.max_batched_tokens, model.max_context; "
    "or take a smaller model"
)


@dataclass(frozen=True)
class VllmSettings:
    """The tables of a run that one engine needs."""

    model: ModelConfig
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    seed: int = 0
    """Seeds the engine itself; every request brings its own seed."""
    deterministic: bool = False
    """One sequence at a time and no prefix cache: results do not depend on what else runs."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model, from its directory."""

    directory: Path
    architectures: tuple[str, ...]
    """Names of its classes; none where its configuration does not say."""
    layout: ModelLayout
    versions: ModelLayout
    """Layout of a published version: the model, or its adapter alone."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    head_dim: int
    kv_bytes_per_token: int


def prepare_environment(settings: VllmSettings) -> None:
    """Set what vLLM, OpenMP and the hub client read at import; a value already set stands.

    Call it before vLLM is first imported in this process; vLLM's own processes inherit it.
    """
    defaults = {
        # Binding to cores would fight the learner for the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Except for the engine of a CPU: engine_process.py.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # Its warnings at every start tell of what a CPU engine never has. On a GPU its lines say
        # which runner and attention it took, how large the KV cache is, and what it captured.
        "VLLM_LOGGING_LEVEL": "ERROR" if is_cpu_build() else "INFO",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(max(1, int(settings.rollout.engine_start_timeout_s))),
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(","):
        os.environ["VLLM_PLUGINS"] = f"{plugins},{PLUGIN}" if plugins else PLUGIN


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is the one for CPUs, without importing it."""
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


def choose_model_runner(wanted: ModelRunner | None, *, on_cpu: bool) -> ModelRunner:
    """Return vLLM's model runner for an engine.

    Args:
        wanted: `rollout.model_runner`.
        on_cpu: the engine runs on the CPU, where cpu/worker.py reads the state of v1.

    Raises:
        PolicySetupError: it is not to be had there.
    """
    if not on_cpu:
        return wanted or GPU_MODEL_RUNNER
    if wanted == "v2":
        raise PolicySetupError(
            'rollout.model_runner ("v2") runs on GPUs only, and this engine runs on the CPU; '
            'remove the key, or set rollout.model_runner = "v1"'
        )
    return "v1"


def read_model(settings: VllmSettings) -> ModelFacts:
    """Find the model and read what it is made of; downloads it when `model.path` is a name.

    Raises:
        PolicySetupError: there is no usable model, or the settings do not fit it.
    """
    model = settings.model
    try:
        directory = model_folder(model.path, model.revision)
    except HubError as exc:
        raise PolicySetupError(str(exc)) from exc
    config = _text_config(directory)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    value_bytes = 4 if model.dtype == "float32" else 2
    try:
        layout = read_model_layout(directory, tied=bool(config.tie_word_embeddings))
        versions = layout if model.lora is None else adapter_layout(layout, model.lora)
        ends = read_end_tokens(directory)
    except ValueError as exc:
        raise PolicySetupError(str(exc)) from exc
    max_positions = getattr(config, "max_position_embeddings", None)
    if max_positions is not None and model.max_context > max_positions:
        raise PolicySetupError(
            f"model.max_context ({model.max_context}) exceeds the {max_positions} "
            f"positions of {directory}; lower model.max_context"
        )
    return ModelFacts(
        directory=directory,
        architectures=tuple(config.architectures or ()),
        layout=layout,
        versions=versions,
        eos_token_ids=ends,
        vocab_size=config.vocab_size,
        head_dim=head_dim,
        kv_bytes_per_token=2 * config.num_hidden_layers * kv_heads * head_dim * value_bytes,
    )


def check_cpu_kernels(facts: ModelFacts) -> None:
    """Refuse a model for whose attention vLLM has no kernel on the CPU.

    Raises:
        PolicySetupError: that is so.
    """
    if facts.head_dim not in CPU_HEAD_SIZES:
        raise PolicySetupError(
            f"the model's attention heads have size {facts.head_dim}; vLLM on the CPU runs "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}; choose hidden_size / num_attention_heads "
            "among these"
        )


def check_cpu_fit(settings: VllmSettings, facts: ModelFacts) -> None:
    """Refuse what a CPU engine cannot run, before a process is started for it.

    Raises:
        PolicyOutOfMemoryError: KV cache and weights exceed the free memory.
        PolicySetupError: the KV cache cannot hold one sequence, or the head size has no kernel.
    """
    check_cpu_kernels(facts)
    model, rollout = settings.model, settings.rollout
    one_sequence = facts.kv_bytes_per_token * model.max_context / GIB
    if one_sequence > rollout.kv_cache_gib:
        raise PolicySetupError(
            f"rollout.kv_cache_gib ({rollout.kv_cache_gib:g}) is less than the "
            f"{one_sequence:.2f} GiB one sequence of model.max_context "
            f"({model.max_context}) tokens needs; raise rollout.kv_cache_gib or lower "
            "model.max_context"
        )
    weights = facts.layout.num_values * (4 if model.dtype == "float32" else 2) / GIB
    free = free_memory_bytes()
    if free is not None and rollout.kv_cache_gib + weights > free / GIB:
        raise PolicyOutOfMemoryError(
            f"rollout.kv_cache_gib ({rollout.kv_cache_gib:g}) and the weights ({weights:.2f} GiB) "
            f"exceed the free memory ({free / GIB:.2f} GiB); {OUT_OF_MEMORY_REMEDY}"
        )


def _text_config(directory: Path) -> Any:
    # transformers takes seconds to import; vLLM needs it as well.
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as exc:
        raise PolicySetupError(
            f"model.path ({directory}) has no usable config.json: {exc}"
        ) from exc
