"""An engine that samples recorded trajectories again; rollout.py runs one for each checkout.

    CHECKOUT/.venv/bin/python replay.py SETTINGS

A line of JSON on standard input asks for a replay (the arguments of `replay`), a line on standard
output tells what it took. It imports nothing else of this folder: a checkout may lack it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil


async def replay(engine: Any, trajectories: Sequence[dict[str, Any]], max_concurrent: int) -> int:
    """Sample as many tokens after the same prompts; return how many.

    Args:
        engine: vLLM's AsyncLLM.
        trajectories: `tokens`, `turns` (the index of each one's first token, and the one after its
            last), their `seeds`, and the `temperature`.
        max_concurrent: Trajectories at a time.
    """
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    room = asyncio.Semaphore(max_concurrent)
    request_ids = itertools.count()

    async def one(trajectory: dict[str, Any]) -> int:
        async with room:
            for (start, end), seed in zip(trajectory["turns"], trajectory["seeds"], strict=True):
                params = SamplingParams(
                    max_tokens=end - start,
                    ignore_eos=True,
                    temperature=trajectory["temperature"],
                    seed=seed,
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    skip_clone=True,
                )
                prompt = tokens_input(trajectory["tokens"][:start])
                async for _ in engine.generate(prompt, params, f"raw-{next(request_ids)}"):
                    pass
        return sum(end - start for start, end in trajectory["turns"])

    return sum(await asyncio.gather(*(one(trajectory) for trajectory in trajectories)))


def _cpu_s() -> tuple[float, float]:
    children = psutil.Process().children(recursive=True)
    times = [child.cpu_times() for child in children]
    return time.process_time(), sum(one.user + one.system for one in times)


async def serve(settings: dict[str, Any]) -> None:
    """Start an engine, and replay once for each line of standard input."""
    from agent_r1.rollout.config import RolloutConfig
    from agent_r1.rollout.vllm.policy import VllmPolicy
    from agent_r1.rollout.vllm.settings import VllmSettings
    from agent_r1.runtime.config import ModelConfig

    tables = ModelConfig(**settings["model"]), RolloutConfig(**settings["rollout"])
    policy = VllmPolicy(VllmSettings(*tables))
    await policy.start()
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked, before, started = json.loads(line), _cpu_s(), time.perf_counter()
            tokens = await replay(policy.engine, **asked)
            wall_s, after = time.perf_counter() - started, _cpu_s()
            taken = {"server_cpu_s": after[0] - before[0], "engine_cpu_s": after[1] - before[1]}
            print(json.dumps({"tokens_per_s": tokens / wall_s, **taken}), flush=True)
    finally:
        await policy.stop()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
