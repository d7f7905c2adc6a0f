"""The sampling engine alone: how it starts, what it chose, whether its scores are whole, its speed.

    python -m scripts.gpu_test.engine FOLDER MODEL DEVICE

__main__.py runs it in a process of its own, and keeps its figures and its log.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_r1.rollout.config import RolloutConfig
from agent_r1.rollout.vllm.policy import VllmPolicy
from agent_r1.rollout.vllm.settings import VllmSettings
from agent_r1.runtime.config import ModelConfig
from scripts.gpu_test.parts import Figures

SETTINGS: dict[str, dict[str, Any]] = {
    "cuda": {"gpu_memory_utilization": 0.5, "max_num_seqs": 64},
    "cpu": {"kv_cache_gib": 0.2, "max_num_seqs": 16},
}
MAX_CONTEXT = {"cuda": 2048, "cpu": 512}
LENGTHS = (2, 31, 32, 33, 64, 65, 100, 364)
"""Of prompts that are scored twice: around a block of the cache, and one with a long prefix."""
SAMPLES = {"cuda": (64, 256), "cpu": (16, 32)}
"""Requests at a time, and tokens of each."""
MOST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.5}
"""Between scores with and without a cached prefix, in nats; those of other weights differ by more
on average."""
DTYPE = "bfloat16"
PATTERNS = {
    "model_runner": r"policy started .*model_runner=(\S+)",
    "asynchronous": r"policy started .*asynchronous=(\S+)",
    "graphs": r"policy started .*graphs=(\S+)",
    "attention": r"Using (\S+) attention backend",
    "kv_cache_tokens": r"KV cache size: ([\d,]+) tokens",
    "load_gib": r"Model loading took ([\d.]+) GiB memory",
    "load_s": r"Model loading took [\d.]+ GiB memory and ([\d.]+) seconds",
    "compile_s": r"torch\.compile.* took ([\d.]+) s",
    "profile_s": r"Initial profiling/warmup run took ([\d.]+) s",
    "capture_s": r"Graph capturing finished in (\d+) secs",
    "capture_gib": r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB",
    "init_s": r"init engine \(.*\) took ([\d.]+) s",
}
"""Of our log, and vLLM's at INFO, by what the report calls it."""


def read_log(text: str) -> dict[str, str]:
    """Return what vLLM logged of its start, by name; what it did not log is not there."""
    found = ((name, re.findall(pattern, text)) for name, pattern in PATTERNS.items())
    return {name: matches[-1] for name, matches in found if matches}


def prompt(length: int, seed: int) -> list[int]:
    """Return a prompt that begins as no other of another seed does."""
    return [2 + (seed * 131 + i * i * 7 + i * 29) % 700 for i in range(length)]


async def check_scores(policy: VllmPolicy) -> dict[str, Any]:
    """Score prompts twice, the second time with a cached prefix; a short answer is an error."""
    largest = 0.0
    for length in LENGTHS:
        tokens = prompt(length, seed=length)
        first, again = await policy.score(tokens), await policy.score(tokens)
        if not len(first) == len(again) == length - 1:
            raise RuntimeError(f"{len(first)} and {len(again)} scores of {length} tokens")
        largest = max([largest, *(abs(a - b) for a, b in zip(first, again, strict=True))])
    if largest > MOST_DIFFERENCE[DTYPE]:
        raise RuntimeError(f"scores with and without a cached prefix differ by {largest:.3g}")
    return {"score_lengths": list(LENGTHS), "score_max_difference": largest}


async def measure_speed(policy: VllmPolicy, device: str) -> dict[str, Any]:
    """Sample many answers at a time, after a first few that warm up."""
    count, tokens = SAMPLES[device]

    async def sample(number: int, name: str) -> int:
        answer = await policy.generate(
            prompt(32, number),
            max_tokens=tokens,
            temperature=1.0,
            seed=number,
            request_id=f"{name}-{number}",
        )
        return len(answer.token_ids)

    await asyncio.gather(*(sample(number, "warm") for number in range(4)))
    started = time.perf_counter()
    sampled = sum(await asyncio.gather(*(sample(number, "all") for number in range(count))))
    seconds = time.perf_counter() - started
    return {"sampled_tokens": sampled, "sampled_tokens_per_s": round(sampled / seconds, 1)}


async def run(folder: Path, model: str, device: str, more: Mapping[str, Any]) -> None:
    """Start an engine and note what it does."""
    figures = Figures(folder)
    table = ModelConfig(path=model, dtype=DTYPE, max_context=MAX_CONTEXT[device])
    policy = VllmPolicy(VllmSettings(table, RolloutConfig(**{**SETTINGS[device], **more})))
    started = time.perf_counter()
    await policy.start()
    figures.note(start_s=round(time.perf_counter() - started, 1))
    try:
        figures.note(**await check_scores(policy))
        figures.note(**await measure_speed(policy, device))
    finally:
        await policy.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    out, model_path, device_name = sys.argv[1:]
    asyncio.run(run(Path(out), model_path, device_name, {}))
