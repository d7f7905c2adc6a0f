"""Generation over HTTP: what `POST /generate` of a rollout server is asked, and what it streams.

Token ids go in and come out: nobody tokenizes what the policy has sampled once more.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agent_r1_proto.messages import StrictMessage
from agent_r1_proto.policies import DEFAULT_POLICY, PolicyName
from agent_r1_proto.trajectory import VersionSpan

FinishReason = Literal["stop", "length"]
"""What ended an answer: the model's own end-of-turn token, or `max_tokens` and the context."""


class GenerateRequest(StrictMessage):
    """Body of `POST /generate`: a prompt, and how its continuation is sampled. T = its tokens."""

    request_id: Annotated[str, Field(min_length=1, max_length=200)]
    """Unique among requests in flight; appears in the engine's log."""
    policy: PolicyName = DEFAULT_POLICY
    """Which policy is to sample."""
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    """[T] the prompt."""
    max_tokens: Annotated[int, Field(gt=0)]
    """Most tokens to sample; cut to what the context leaves."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """0 is greedy."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Of this request alone."""


class GeneratedPart(StrictMessage):
    """Line of the answer of `POST /generate`: tokens as they were sampled. N = those of this part.

    The last line has a `finish_reason`, or an `error`; an answer without either was cut off.
    """

    token_ids: list[int] = []
    """[N] sampled tokens."""
    logprobs: list[float] = []
    """[N] natural-log probability of each, at the sampling temperature."""
    version_spans: list[VersionSpan] = []
    """Which weights sampled which of the answer's tokens; start and end count from its first."""
    finish_reason: Annotated[FinishReason | None, Field(exclude_if=lambda value: value is None)] = (
        None
    )
    """Why the answer is over; None while it goes on."""
    error: Annotated[str, Field(exclude_if=lambda value: not value)] = ""
    """Why nothing more comes, where the engine failed."""
