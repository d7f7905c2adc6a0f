"""Memory of the learner: the estimate of `agent-r1 check` beside what it takes on this CPU.

    make bench CASE=estimate ARGS="--only SETTING ..."

Each setting is a process of its own: it loads the training engine of a random model, notes the
memory, and takes two steps on random trajectories. "state" is weights and AdamW between two steps;
"peak" is the most that was resident during the second step. Both are counted from before the model
was loaded. For some settings, a second process measures the same peak with an allocator that gives
back at once what is freed ("used"): what remains is what the training needs.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import json
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, read_options, write_report

MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
LEARNER = {"max_tokens_per_microbatch": 1024, "logprob_chunk_tokens": 256}
SHORT = {
    "table": {"dtype": "bfloat16"},
    "max_tokens_per_microbatch": 64,
    "logprob_chunk_tokens": 64,
}
"""Few tokens: many CPUs multiply in bfloat16 ten times slower than in float32."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tokens": {"max_tokens_per_microbatch": 2048},
    "checkpointing": {"max_tokens_per_microbatch": 2048, "activation_checkpointing": True},
    "vocabulary": {"model": {"vocab_size": 32000}, "logprob_chunk_tokens": 512},
    "tied": {"model": {"vocab_size": 32000, "tie_word_embeddings": True}},
    "deep": {"model": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 24}},
    "padded": {"max_tokens_per_microbatch": 2048, "share_prefixes": False},
    "reference": {"reference": True},
    "critic": {"critic": True},
    "zero1": {"zero_stage": 1},
    "zero1 on 2 ranks": {"zero_stage": 1, "ranks": 2},
    "zero2 on 2 ranks": {"zero_stage": 2, "ranks": 2},
    "zero3 on 2 ranks": {"zero_stage": 3, "ranks": 2},
    "offload": {"zero_stage": 2, "offload": "optimizer"},
    "offload all": {"zero_stage": 3, "offload": "all"},
    "lora": {"table": {"lora": {"rank": 16}}},
    "bfloat16": SHORT,
    "bfloat16, zero2 on 2 ranks": {**SHORT, "zero_stage": 2, "ranks": 2},
    "bfloat16, zero3 on 2 ranks": {**SHORT, "zero_stage": 3, "ranks": 2},
    "bfloat16, offload": {**SHORT, "zero_stage": 2, "offload": "optimizer"},
    "bfloat16, offload on 2 ranks": {**SHORT, "zero_stage": 3, "offload": "optimizer", "ranks": 2},
}
"""Of the model's shape, of `[model]` ("table"), of the engine, and what is beside the policy."""
BARE = ("plain", "checkpointing", "deep")
"""Settings whose peak is measured with the other allocator as well."""
M_MMAP_THRESHOLD = -3
"""Of `mallopt`: larger blocks are mapped apart, and unmapped when they are freed."""
GIVEN_BACK_BYTES = 1 << 16
LENGTH = 256
"""Most tokens of a trajectory."""
MEASURED = "BENCH_ESTIMATE"
"""A variable with setting and model folder: the other ranks, which rank 0 starts with this
module's own command, join it in measuring them."""


def resident(field: str) -> float:
    """Return `VmRSS` or `VmHWM` of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


def measure(name: str, gives_back: bool) -> Row:
    """Measure one setting in this process."""
    if gives_back:
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, GIVEN_BACK_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        return _measure_in(name, Path(folder))


def _measure_in(name: str, folder: Path) -> Row:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from agent_r1.learner.engine.interface import LossSpec
    from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine

    importlib.import_module("agent_r1.learner.engine.ranks.engine")  # with its libraries
    torch.set_num_threads(1)
    shape = {**MODEL, **SETTINGS[name].get("model", {})}
    Qwen2ForCausalLM(Qwen2Config(**shape)).save_pretrained(folder)
    os.environ[MEASURED] = json.dumps([name, str(folder)])
    setup = make_setup(name, folder)
    samples = make_samples(setup, shape["vocab_size"])
    _trim()
    before = resident("VmRSS")
    engine = DeepSpeedPolicyEngine(setup)
    spec = LossSpec(kl_coef=0.1 if setup.with_reference else 0.0)
    engine.train_batch(samples, spec)
    _trim()
    state = resident("VmRSS") - before
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts again
    engine.train_batch(samples, spec)
    peak = resident("VmHWM") - before
    engine.close()
    found = {"state": state, "peak": peak, **estimated(setup, folder)}
    return {f"{what}_mb": round(size / 1e6, 1) for what, size in found.items()}


def make_setup(name: str, folder: Path) -> Any:
    """Return the engine of a setting."""
    from agent_r1.learner.config import EngineConfig
    from agent_r1.learner.engine.ranks.messages import CriticSetup, EngineSetup
    from agent_r1.runtime.config import ModelConfig

    keys: dict[str, Any] = LEARNER | SETTINGS[name]
    keys.pop("model", None)
    table = ModelConfig.model_validate({"path": str(folder), **keys.pop("table", {})})
    critic = CriticSetup(table, 1e-5, 0) if keys.pop("critic", False) else None
    reference = keys.pop("reference", False)
    config = EngineConfig.model_validate({"device": "cpu", **keys})
    return EngineSetup.of(table, config, with_reference=reference, critic=critic)


def make_samples(setup: Any, vocabulary: int) -> list[Any]:
    """Return random trajectories for two micro-batches a rank: the second adds to gradients."""
    from benchmarks.samples import random_samples

    tokens = setup.config.max_tokens_per_microbatch
    length = min(LENGTH, tokens)
    samples = random_samples([length] * (2 * setup.config.ranks * tokens // length), vocabulary)
    if setup.critic is None:
        return samples
    zeros = np.zeros(length, np.float32)
    return [
        dataclasses.replace(one, value_mask=one.loss_mask, returns=zeros, old_values=zeros)
        for one in samples
    ]


def estimated(setup: Any, folder: Path) -> dict[str, float]:
    """Return what `agent-r1 check` says of an engine, in bytes."""
    from agent_r1.config.estimate import (
        activation_parts,
        bucket_parts,
        cpu_buffers,
        offloaded_parts,
        read_model_size,
        state_parts,
        total,
        value_bytes,
    )

    config, table = setup.config, setup.model
    size, critic = read_model_size(folder, table.lora), None
    parts = list(state_parts(size, config, table.dtype, "policy"))
    parts += offloaded_parts(size, config, table.dtype, "policy", page_locked=False)
    if setup.with_reference:
        parts += [part for part in parts if part.name == "policy: weights"]
    if setup.critic is not None:
        critic = size
        parts += list(state_parts(size, config, table.dtype, "critic"))
    parts.append(cpu_buffers(config, table.dtype))
    held = total(parts) - _passing(size.trained, config, table.dtype) * (2 if critic else 1)
    if config.zero_stage == 3:
        held += size.trained * value_bytes(table.dtype)  # its bucket
    parts += bucket_parts(size, critic, config, table.dtype)
    tokens = config.max_tokens_per_microbatch
    *activations, kept_by_allocator = activation_parts(size, config, table, tokens, on_gpu=False)
    used = total(parts) + total(activations)
    return {
        "estimated_state": held,
        "estimated_used": used,
        "estimated_peak": used + kept_by_allocator.size,
    }


def _passing(count: int, config: Any, dtype: Any) -> float:
    """Return the bytes of gradients that are freed between two steps."""
    from agent_r1.config.estimate import FLOAT, value_bytes, zero_stage

    stage = zero_stage(config, dtype)
    if stage == 3 or (config.offload != "none" and dtype == "float32"):
        return 0
    if stage == 1 and dtype == "bfloat16":
        return count * value_bytes(dtype)  # its sum stays
    return count * FLOAT * (1 / config.ranks + (stage == 1) if stage else 1)


def _trim() -> None:
    """Give freed memory back, so that what is resident is what is used."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def run(name: str) -> Row:
    """Measure one setting in processes of its own."""
    found = in_process(name, gives_back=False)
    whats = ["state", "peak"]
    if name in BARE:
        found["used_mb"] = in_process(name, gives_back=True)["peak_mb"]
        whats.append("used")
    for what in whats:
        found[f"{what}_error"] = round(found[f"estimated_{what}_mb"] / found[f"{what}_mb"] - 1, 3)
    return {"setting": name, **found}


def in_process(name: str, *, gives_back: bool) -> Row:
    """Measure one setting in a process forked from this one, which has imported everything.

    Args:
        name: of the setting.
        gives_back: let the allocator give back at once what is freed.
    """
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(measure, name, gives_back).result()


def join() -> None:
    """Be another rank of the setting that rank 0 measures."""
    from agent_r1.learner.engine.ranks.rank_env import read_place
    from agent_r1.learner.engine.ranks.worker import follow

    name, folder = json.loads(os.environ[MEASURED])
    setup = make_setup(name, Path(folder))
    follow(read_place(os.environ, setup.config.ranks, setup.table_name), [setup])


def main() -> None:
    """Measure every setting."""
    options = read_options(__doc__, only=tuple(SETTINGS))
    importlib.import_module("agent_r1.learner.engine.policy_engine")
    write_report("estimate", [run(name) for name in options.only])


if __name__ == "__main__":
    join() if MEASURED in os.environ else main()
