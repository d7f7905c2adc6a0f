"""Parts of runs that train random models, or that are measured from within."""

from __future__ import annotations

import functools
import hashlib
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from agent_r1.learner.algorithms.advantages.grpo import Grpo
from agent_r1.text.tool_formats import HERMES, CallBlock, ParsedCall, ToolFormat

if TYPE_CHECKING:
    from agent_r1 import ScoreRequest
    from agent_r1.learner.algorithms.advantages import AdvantageBatch, Advantages

QUERY_CHARS = 40
MISSED_PUSHES = "missed_pushes.jsonl"
LIMIT_S = 60.0


def chance(request: ScoreRequest) -> float:
    """Return a reward in [0, 1) that depends on nothing but the text, so steps have gradients."""
    text = "".join(turn.text for turn in request.turns)
    return hashlib.blake2b(text.encode(), digest_size=1).digest()[0] / 256


class EveryTurnSearches(ToolFormat):
    """Reads a turn that holds no call as a search for its first characters."""

    example, trace = HERMES.example, HERMES.trace

    def find(self, text: str, start: int) -> CallBlock | None:
        """Return the call that was written, else the whole turn as one."""
        found = HERMES.find(text, start)
        if found is not None or start > 0 or not text:
            return found
        call = ParsedCall("search", {"query": text[:QUERY_CHARS]}, end=len(text))
        return CallBlock(0, len(text), [call])


class WatchedGrpo(Grpo):
    """GRPO, in a learner whose missed pushes are measured from the first batch on."""

    def __call__(self, batch: AdvantageBatch) -> Advantages:
        """Return the advantages of a batch."""
        watch_missed_pushes()
        return super().__call__(batch)


@functools.cache
def watch_missed_pushes() -> None:
    """Let every publisher of this process compare a server before it publishes a version as well.

    Once a version is published, servers load it by themselves.
    """
    from agent_r1.learner.weights.canary import canary_request, compare
    from agent_r1.learner.weights.publisher import WeightPublisher
    from agent_r1_proto.weights import CanaryReply

    take: Any = WeightPublisher.take

    async def compare_and_take(self: Any, canary: Any = ()) -> Any:
        if canary:
            started = time.perf_counter()
            (server,) = await self._registry.rollout_servers()
            prompts = await self._choose_tokens(canary)
            request = canary_request(prompts)
            reply = await self._servers.post(
                server, "/weights/canary", request, CanaryReply, LIMIT_S
            )
            assert reply.policy_version == self.newest.policy_version
            missed = compare(prompts, reply.logprobs)
            line = {**asdict(missed), "extra_s": time.perf_counter() - started}
            with (self._weights_dir.parent / MISSED_PUSHES).open("a") as file:
                file.write(json.dumps(line) + "\n")
        return await take(self, canary)

    WeightPublisher.take = compare_and_take
