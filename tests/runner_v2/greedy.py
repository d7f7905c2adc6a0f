"""Greedy answers of a CPU engine with Model Runner V1, as JSON, for the tests of V2.

    python -m tests.runner_v2.greedy MODEL_DIR

Reads prompts, a JSON list of lists of token ids, from standard input. A process of its own without
Triton, because one process cannot have both runners.
"""

from __future__ import annotations

import asyncio
import json
import sys

from agent_r1.rollout.vllm.policy import VllmPolicy
from tests.support.live_engine import MAX_CONTEXT, engine_settings

NUM_TOKENS = 24


async def answer(model_dir: str, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and log-probabilities of each prompt's answer."""
    policy = VllmPolicy(engine_settings(model_dir, max_context=MAX_CONTEXT, kv_cache_gib=0.1))
    await policy.start()
    try:
        return await answer_all(policy, prompts)
    finally:
        await policy.stop()


async def answer_all(
    policy: VllmPolicy, prompts: list[list[int]]
) -> list[tuple[list[int], list[float]]]:
    """Return the greedy answers of a policy, asked at the same time."""
    answers = await asyncio.gather(
        *(
            policy.generate(
                prompt, max_tokens=NUM_TOKENS, temperature=0.0, seed=0, request_id=f"greedy-{i}"
            )
            for i, prompt in enumerate(prompts)
        )
    )
    return [(one.token_ids, one.logprobs) for one in answers]


if __name__ == "__main__":
    json.dump(asyncio.run(answer(sys.argv[1], json.load(sys.stdin))), sys.stdout)
