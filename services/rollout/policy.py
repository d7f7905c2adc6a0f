"""The policy as a rollout server sees it: a sampler with versioned weights.

weight_versions.py drives `load_weights` and `score` for the learner. `VllmPolicy` (vllm/policy.py)
is the real one; tests bring their own. Imports no engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_r1.text.tokens import PolicyError, Sampler
from agent_r1_proto.generation import GeneratedPart, GenerateRequest
from agent_r1_proto.weights import WeightManifest


class PolicySetupError(PolicyError):
    """The sampler cannot start: missing model, unsupported engine release, bad setting."""


class PolicyOutOfMemoryError(PolicyError):
    """The engine ran out of memory; the message names the config keys to lower, in order."""


@dataclass(frozen=True)
class LoadTiming:
    """Duration of a weight load."""

    fetch_s: float
    """Reading and verifying, while generation went on, in seconds."""
    pause_s: float
    """Time generation stood still, in seconds."""


@dataclass
class EngineWork:
    """Work of an engine: done since it started, and waiting now."""

    steps: int = 0
    prompt_tokens: int = 0
    """Computed; those that its cache held are not counted."""
    sampled_tokens: int = 0
    running: int = 0
    """Requests that take part in its steps."""
    waiting: int = 0
    """Requests that have no room in them."""
    kv_cache_used: float = 0.0
    """Share of its KV cache."""


class Policy(Sampler, Protocol):
    """A sampler with versioned weights."""

    policy_version: int
    """Version of the weights new tokens are sampled with; 0 is the configured model."""
    work: EngineWork
    """Work of the engine, as of its last step."""
    is_loading: bool
    """Whether weights are being replaced, so that generation stands still for a while."""

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Tokens that end a turn."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Generations that have started and not ended."""
        ...

    @property
    def death(self) -> str | None:
        """None while the engine is alive; else one line that says why it stopped."""
        ...

    async def start(self) -> None:
        """Load the configured model as version 0 and get ready to sample.

        Raises:
            PolicySetupError: the model or the engine cannot be used.
            PolicyOutOfMemoryError: the engine does not fit.
        """
        ...

    def stream(self, request: GenerateRequest) -> AsyncGenerator[GeneratedPart]:
        """Sample as `generate` does, and yield tokens as they come; the last part says why it ends.

        Closing the iterator aborts the request in the engine.

        Raises:
            PromptError: the prompt holds an unknown id or fills the context.
            ValueError: the request's id is in flight.
            EngineDeadError: the engine failed; also while the parts come.
        """
        ...

    async def load_weights(self, manifest: WeightManifest) -> LoadTiming:
        """Verify a snapshot, then pause, load it, and resume, requests in flight included.

        Verification is complete before anything pauses. Calls are served one at a time. A
        manifest of the version already in use is loaded again.

        Raises:
            WeightsRefusedError: the snapshot is missing, damaged, or of another model; the old
                version keeps serving.
            EngineDeadError: the engine failed while loading.
        """
        ...

    async def score(self, token_ids: list[int], first: int = 1) -> list[float]:
        """Return log-probabilities of tokens first..T-1 given those before them, at temperature 1.

        Args:
            token_ids: [T] a prompt.
            first: from 1 to T-1; where the engine has tokens before it in its cache, none of them
                is computed again.

        Raises:
            PromptError: fewer than two tokens, an unknown id, or more than the context holds.
            EngineDeadError: the engine failed.
        """
        ...

    async def probe(self) -> None:
        """Return once the engine has shown that it works.

        With requests in flight that is between two of its steps; without, after one more token.
        Has no timeout: whoever asks decides how long is too long.

        Raises:
            EngineDeadError: the engine failed.
        """
        ...

    def kill(self, reason: str) -> None:
        """End an engine that does not answer, at once; generations end with EngineDeadError.

        Args:
            reason: what `death` says from now on.
        """
        ...

    async def stop(self) -> None:
        """Shut the engine down; generations in flight end with EngineDeadError."""
        ...
