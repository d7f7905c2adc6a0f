"""The sampler as whoever records an interaction sees it: token ids in, sampled tokens out.

tokens.py asks a `Sampler` for a `Generation`. The engine of rollout is one (rollout/policy.py);
tests bring their own. Imports no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from agent_r1_proto.trajectory import VersionSpan

FinishReason = Literal["stop", "length"]


class PolicyError(Exception):
    """A sampler could not do what was asked; the message says value, limit and remedy."""


class PromptError(PolicyError, ValueError):
    """The prompt cannot be sampled from: it is empty or holds an id outside the vocabulary."""


class PromptTooLongError(PromptError):
    """The prompt leaves no room for a single sampled token within the context."""


class EngineDeadError(PolicyError):
    """The engine stopped; nothing can be sampled until the service is started again."""


@dataclass(frozen=True)
class Generation:
    """What the policy sampled after one prompt.

    N = sampled tokens, the end-of-turn token included when it was sampled.
    """

    token_ids: list[int]
    """[N] sampled tokens."""
    logprobs: list[float]
    """[N] natural-log probability of each, at the sampling temperature."""
    version_spans: list[VersionSpan]
    """Which weights sampled tokens [start, end) of this generation; in order, covering [0, N)."""
    finish_reason: FinishReason
    """"stop": ended by the model's own end-of-turn token; "length": by `max_tokens` or context."""


class Sampler(Protocol):
    """What writes the turns of a trajectory.

    `generate` may be called concurrently without bound; the caller limits what is in flight.
    """

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and generation together."""
        ...

    async def generate(
        self,
        token_ids: list[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        request_id: str,
    ) -> Generation:
        """Sample after a prompt until an end-of-turn token, `max_tokens` or the context's end.

        Cancelling the call aborts the request in the engine.

        Args:
            token_ids: [T] the prompt; never re-tokenized.
            max_tokens: most tokens to sample; cut to what the context leaves.
            temperature: 0 is greedy.
            seed: of this request alone.
            request_id: unique among requests in flight; appears in the engine's log.

        Raises:
            PromptError: the prompt is empty, holds an unknown id or fills the context.
            EngineDeadError: the engine failed.
        """
        ...
