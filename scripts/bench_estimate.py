"""What `agent-r1 check` says of the learner's memory, beside what it takes on this CPU.

    python scripts/bench_estimate.py [--only NAME ...] [--out FILE]

Each setting is a process of its own: it loads the training engine of a random model, notes the
memory, and takes two steps on random trajectories. "state" is weights and AdamW between two steps;
"peak" is the most that was resident during the second step. Both are counted from before the model
was loaded. For some settings, a second process measures the same peak with an allocator that gives
back at once what is freed ("used"): what remains is what the training needs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "results" / "estimate.json"
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8000,
    "tie_word_embeddings": False,
}
LEARNER = {"max_tokens_per_microbatch": 1024, "logprob_chunk_tokens": 256}
SHORT = {"max_tokens_per_microbatch": 64, "logprob_chunk_tokens": 64}
"""Few tokens: many CPUs multiply in bfloat16 ten times slower than in float32."""
BFLOAT16: dict[str, Any] = {"table": {"dtype": "bfloat16"}, "learner": SHORT}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tokens": {"learner": {"max_tokens_per_microbatch": 2048}},
    "checkpointing": {
        "learner": {"max_tokens_per_microbatch": 2048, "activation_checkpointing": True}
    },
    "vocabulary": {"model": {"vocab_size": 32000}, "learner": {"logprob_chunk_tokens": 512}},
    "tied": {"model": {"vocab_size": 32000, "tie_word_embeddings": True}},
    "deep": {"model": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 24}},
    "padded": {"learner": {"max_tokens_per_microbatch": 2048, "share_prefixes": False}},
    "reference": {"reference": True},
    "critic": {"critic": True},
    "zero1": {"learner": {"zero_stage": 1}},
    "zero1 on 2 ranks": {"learner": {"zero_stage": 1, "ranks": 2}},
    "zero2 on 2 ranks": {"learner": {"zero_stage": 2, "ranks": 2}},
    "zero3 on 2 ranks": {"learner": {"zero_stage": 3, "ranks": 2}},
    "offload": {"learner": {"zero_stage": 2, "offload": "optimizer"}},
    "offload all": {"learner": {"zero_stage": 3, "offload": "all"}},
    "lora": {"table": {"lora": {"rank": 16}}},
    "bfloat16": BFLOAT16,
    "bfloat16, zero2 on 2 ranks": {**BFLOAT16, "learner": {**SHORT, "zero_stage": 2, "ranks": 2}},
    "bfloat16, zero3 on 2 ranks": {**BFLOAT16, "learner": {**SHORT, "zero_stage": 3, "ranks": 2}},
    "bfloat16, offload": {
        **BFLOAT16,
        "learner": {**SHORT, "zero_stage": 2, "offload": "optimizer"},
    },
    "bfloat16, offload on 2 ranks": {
        **BFLOAT16,
        "learner": {**SHORT, "zero_stage": 3, "offload": "optimizer", "ranks": 2},
    },
}
BARE = ("plain", "checkpointing", "deep")
"""Settings whose peak is measured with the other allocator as well."""
M_MMAP_THRESHOLD = -3
"""Of `mallopt`: larger blocks are mapped apart, and unmapped when they are freed."""
GIVEN_BACK_BYTES = 1 << 16
LENGTH = 256
"""Most tokens of a trajectory."""
MEASURED = "BENCH_ESTIMATE"
"""A variable with setting and model folder: the other ranks, which rank 0 starts with this
script's own command, join it in measuring them."""


def resident(field: str) -> float:
    """Return `VmRSS` or `VmHWM` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Measure one setting in this process."""
    import torch

    from agent_r1.learner.engine.interface import LossSpec
    from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine

    importlib.import_module("agent_r1.learner.engine.ranks.engine")  # with its libraries
    torch.set_num_threads(1)
    shape = {**MODEL, **SETTINGS[name].get("model", {}), "max_position_embeddings": 4096}
    _write_model(folder, shape)
    os.environ[MEASURED] = json.dumps([name, str(folder)])
    setup = _setup(name, folder)
    samples = _samples(setup, shape["vocab_size"])
    _trim()
    before = resident("VmRSS")
    engine = DeepSpeedPolicyEngine(setup)
    spec = LossSpec(kl_coef=0.1 if setup.with_reference else 0.0)
    engine.train_batch(samples, spec)
    _trim()
    state = resident("VmRSS") - before
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    engine.train_batch(samples, spec)
    peak = resident("VmHWM") - before
    engine.close()
    measured = {"state_mb": round(state / 1e6, 1), "peak_mb": round(peak / 1e6, 1)}
    return {"setting": name, **measured, **_estimated(setup, folder)}


def _write_model(folder: Path, shape: dict[str, Any]) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    Qwen2ForCausalLM(Qwen2Config(**shape)).save_pretrained(folder)
    gc.collect()


def _setup(name: str, folder: Path) -> Any:
    """Return the engine of a setting."""
    from agent_r1.learner.config import EngineConfig
    from agent_r1.learner.engine.ranks.messages import CriticSetup, EngineSetup
    from agent_r1.runtime.config import ModelConfig

    setting = SETTINGS[name]
    table = ModelConfig.model_validate({"path": str(folder), **setting.get("table", {})})
    config = EngineConfig.model_validate({"device": "cpu", **LEARNER, **setting.get("learner", {})})
    critic = CriticSetup(table, 1e-5, 0) if setting.get("critic") else None
    return EngineSetup.of(
        table, config, with_reference=bool(setting.get("reference")), critic=critic
    )


def _samples(setup: Any, vocabulary: int) -> list[Any]:
    """Return random trajectories for two micro-batches a rank: the second adds to gradients."""
    import numpy as np

    from agent_r1.learner.engine.interface import TrainSample

    rng = np.random.default_rng(0)
    tokens = setup.config.max_tokens_per_microbatch
    length = min(LENGTH, tokens)
    mask = np.ones(length, np.bool_)
    mask[0] = False
    return [
        TrainSample(
            token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
            loss_mask=mask,
            rollout_logprobs=np.where(mask, -9.0, 0.0).astype(np.float32),
            advantages=np.where(mask, rng.normal(), 0.0).astype(np.float32),
            **(_values(mask) if setup.critic is not None else {}),
        )
        for _ in range(2 * setup.config.ranks * tokens // length)
    ]


def _estimated(setup: Any, folder: Path) -> dict[str, Any]:
    """Return what `agent-r1 check` says of an engine."""
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
    buckets = list(bucket_parts(size, critic, config, table.dtype))
    held = total(parts) - _passing(size.trained, config, table.dtype) * (2 if critic else 1)
    if config.zero_stage == 3:
        held += size.trained * value_bytes(table.dtype)  # its bucket
    parts += buckets
    tokens = config.max_tokens_per_microbatch
    more = list(activation_parts(size, config, table, tokens, on_gpu=False))
    used = total(parts) + total(more[:-1])
    return {
        "weights": size.weights,
        "estimated_state_mb": round(held / 1e6, 1),
        "estimated_used_mb": round(used / 1e6, 1),
        "estimated_peak_mb": round((used + more[-1].size) / 1e6, 1),
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


def _values(mask: Any) -> dict[str, Any]:
    import numpy as np

    zeros = np.zeros(len(mask), np.float32)
    return {"value_mask": mask, "returns": zeros, "old_values": zeros}


def _trim() -> None:
    """Give freed memory back, so that what is resident is what is used."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def run(name: str) -> dict[str, Any]:
    """Measure one setting in processes of its own."""
    found = in_process(name, gives_back=False)
    for what in ("state", "peak"):
        found[f"{what}_error"] = round(found[f"estimated_{what}_mb"] / found[f"{what}_mb"] - 1, 3)
    if name in BARE:
        used = in_process(name, gives_back=True)["peak_mb"]
        found |= {"used_mb": used, "used_error": round(found["estimated_used_mb"] / used - 1, 3)}
    return found


def in_process(name: str, *, gives_back: bool) -> dict[str, Any]:
    """Measure one setting in a process forked from this one, which has imported everything.

    Args:
        name: of the setting.
        gives_back: let the allocator give back at once what is freed.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_measure_into, args=(sender, name, gives_back)
    )
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError as exc:
        raise RuntimeError(f"{name} was not measured; the lines above say why") from exc
    finally:
        process.join()


def _measure_into(sender: Any, name: str, gives_back: bool) -> None:
    if gives_back:
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, GIVEN_BACK_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        sender.send(measure(name, Path(folder)))
    sender.close()
    os._exit(0)  # nothing that was forked along has to end in order


def join() -> None:
    """Be another rank of the setting that rank 0 measures."""
    from agent_r1.learner.engine.ranks.place import read_place
    from agent_r1.learner.engine.ranks.worker import follow

    name, folder = json.loads(os.environ[MEASURED])
    setup = _setup(name, Path(folder))
    follow(read_place(os.environ, setup.config.ranks, setup.table_name), [setup])


def main() -> None:
    """Measure every setting and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), help="settings")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    importlib.import_module("agent_r1.learner.engine.policy_engine")
    results = []
    for name in arguments.only:
        results.append(run(name))
        print(json.dumps(results[-1]), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    join() if MEASURED in os.environ else main()
