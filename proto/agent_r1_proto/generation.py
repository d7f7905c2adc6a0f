"""Generation over HTTP: what `POST /generate` of a rollout server is asked, and what it streams.

Token ids go in and come out: nobody tokenizes what the policy has sampled once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field

from agent_r1_proto.messages import StrictMessage
from agent_r1_proto.policies import DEFAULT_POLICY, PolicyName
from agent_r1_proto.trajectory import VersionSpan

FinishReason = Literal["stop", "length"]
"""End of an answer: the model's own end-of-turn token, or `max_tokens` and the context."""


class GenerateRequest(StrictMessage):
    """Body of `POST /generate`: a prompt, and how its continuation is sampled. T = its tokens."""

    request_id: Annotated[str, Field(min_length=1, max_length=200)]
    """Unique among requests in flight; appears in the engine's log."""
    policy: PolicyName = DEFAULT_POLICY
    """Policy that is to sample."""
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    """[T] the prompt."""
    max_tokens: Annotated[int, Field(gt=0)]
    """Most tokens to sample; cut to what the context leaves."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """0 is greedy."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Seed of this request alone."""
    every_s: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Least time between two parts of the answer, in seconds: what is sampled meanwhile comes
    together. The first and the last part do not wait."""


class GeneratedPart(StrictMessage):
    """Line of the answer of `POST /generate`: tokens as they were sampled. N = those of this part.

    The last line has a `finish_reason`, or an `error`; an answer without either was cut off.
    """

    token_ids: list[int] = []
    """[N] sampled tokens."""
    logprobs: list[float] = []
    """[N] natural-log probability of each, at the sampling temperature."""
    version_spans: list[VersionSpan] = []
    """Versions of the weights that sampled the answer's tokens; start and end count from its
    first."""
    finish_reason: Annotated[FinishReason | None, Field(exclude_if=lambda value: value is None)] = (
        None
    )
    """Why the answer is over; None while it goes on."""
    error: Annotated[str, Field(exclude_if=lambda value: not value)] = ""
    """Why nothing more comes, where the engine failed."""

    @classmethod
    def joined(cls, parts: Sequence[GeneratedPart]) -> Self:
        """Return parts that follow each other as one; the last one says why the answer is over."""
        return cls(
            token_ids=[token for part in parts for token in part.token_ids],
            logprobs=[logprob for part in parts for logprob in part.logprobs],
            version_spans=[span for part in parts for span in part.version_spans],
            finish_reason=parts[-1].finish_reason,
            error=parts[-1].error,
        )

    def split(self) -> Sequence[GeneratedPart]:
        """Return a part for each token, in order."""
        if len(self.token_ids) < 2:
            return [self]
        versions = [
            VersionSpan(policy_version=span.policy_version, start=position, end=position + 1)
            for span in self.version_spans
            for position in range(span.start, span.end)
        ]
        parts = [
            GeneratedPart(token_ids=[token], logprobs=[logprob], version_spans=[version])
            for token, logprob, version in zip(self.token_ids, self.logprobs, versions, strict=True)
        ]
        end = {"finish_reason": self.finish_reason, "error": self.error}
        return [*parts[:-1], parts[-1].model_copy(update=end)]
