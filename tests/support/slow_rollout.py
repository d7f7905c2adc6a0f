"""A rollout server in a process of its own that writes letters by chance, slowly, for tests that
kill it in mid-stream.

Arguments: Redis URL, run id, announce folder, model folder (for its tokenizer), seconds a token.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

from agent_r1.rollout.config import EnvConfig, RolloutConfig
from agent_r1.rollout.main import RolloutSettings, serve_policy
from agent_r1.runtime.config import ModelConfig, RedisConfig, RunConfig
from agent_r1.text.chat_format import ChatFormat
from agent_r1.text.chat_template import load_tokenizer, read_end_tokens
from agent_r1_proto.generation import GeneratedPart, GenerateRequest
from agent_r1_proto.trajectory import VersionSpan
from tests.support.fakes import FakePolicy


class SlowPolicy(FakePolicy):
    """Writes 5 to 40 letters, which its request's seed chooses."""

    def __init__(self, letters: list[int], end_id: int, token_s: float) -> None:
        super().__init__([[end_id]], eos_token_ids=[end_id], max_context=1 << 20)
        self._letters, self._end_id, self._token_s = letters, end_id, token_s

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[GeneratedPart]:
        self.streams.append(request.request_id)
        chance = random.Random(request.seed)
        try:
            count = min(chance.randint(5, 40), request.max_tokens)
            for i in range(count):
                await asyncio.sleep(self._token_s)  # the speed of an engine
                last = i + 1 == count
                yield GeneratedPart(
                    token_ids=[self._end_id if last else chance.choice(self._letters)],
                    logprobs=[-0.5],
                    version_spans=[VersionSpan(policy_version=0, start=i, end=i + 1)],
                    finish_reason="stop" if last else None,
                )
        finally:
            self.streams.remove(request.request_id)


def main() -> None:
    """Serve until killed."""
    url, run_id, announce_dir, model, token_s = sys.argv[1:]
    tokenizer = load_tokenizer(model)
    ends = read_end_tokens(Path(model))
    chat = ChatFormat(tokenizer, end_of_turn_ids=ends)
    settings = RolloutSettings(
        run=RunConfig(id=run_id),
        model=ModelConfig(path=model),
        redis=RedisConfig(url=url),
        env=EnvConfig(),
        rollout=RolloutConfig(announce_expiry_s=2.0),
        tools={},
        weights_dir=Path(announce_dir).parent,
        takes_samples=False,
        announce_dir=Path(announce_dir),
    )
    letters = [chat.encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz"]
    policy = SlowPolicy(letters, ends[0], float(token_s))
    asyncio.run(serve_policy(policy, chat, settings))


if __name__ == "__main__":
    main()
