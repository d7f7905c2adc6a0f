"""A rollout server in a process of its own, with a scripted model, for tests that kill it.

Arguments: Redis URL, run id, announce folder, lease in seconds.
The model never ends its first turn.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from agent_r1.rollout.config import EnvConfig, RolloutConfig
from agent_r1.rollout.main import RolloutSettings, serve_policy
from agent_r1.runtime.config import ModelConfig, RedisConfig, RunConfig
from agent_r1.text.chat_format import ChatFormat
from tests.support.fakes import FakePolicy, build_tokenizer


async def _never_ends(token_ids: list[int], number: int) -> list[int]:
    await asyncio.Event().wait()
    return token_ids[:number]


def main() -> None:
    """Serve until killed."""
    url, run_id, announce_dir, lease_s = sys.argv[1:]
    tokenizer = build_tokenizer()
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    settings = RolloutSettings(
        run=RunConfig(id=run_id),
        model=ModelConfig(path="scripted"),
        redis=RedisConfig(url=url, lease_s=float(lease_s)),
        env=EnvConfig(),
        rollout=RolloutConfig(),
        tools={},
        weights_dir=Path(announce_dir).parent,
        announce_dir=Path(announce_dir),
    )
    policy = FakePolicy(_never_ends, eos_token_ids=[end_id])
    asyncio.run(serve_policy(policy, ChatFormat(tokenizer, end_of_turn_ids=[end_id]), settings))


if __name__ == "__main__":
    main()
