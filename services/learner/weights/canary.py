"""The canary: do rollout servers sample with the weights the learner thinks they have?

publisher.py asks a server for the log-probabilities of a few tokens and compares them with the
learner's. Pure: bounds and verdicts only.

The mean over the sampled tokens is judged, not the maximum: where attention is close to a tie,
float32 itself moves one token in some ten thousand by more than 1e-4 with equal weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from agent_r1_proto.trajectory import Trajectory
from agent_r1_service.config import Dtype

MEAN_DLOGP: dict[Dtype, float] = {"float32": 2e-5, "bfloat16": 0.05}
"""Mean |difference| allowed by default, in nats; measurements are in docs/benchmarks.md."""


class CanaryError(RuntimeError):
    """A rollout server does not sample with the weights that were published."""


@dataclass(frozen=True)
class CanaryBounds:
    """How far the log-probabilities of learner and rollout may differ."""

    dtype: Dtype
    mean_dlogp: float
    """Mean |difference| always allowed."""
    fail_factor: float
    """bfloat16: mean allowed, as a multiple of the noise floor."""
    warn_factor: float
    """bfloat16: mean that is warned of, as a multiple of the noise floor."""


@dataclass(frozen=True)
class CanaryReading:
    """One comparison, in nats."""

    mean: float
    max: float


@dataclass(frozen=True)
class CanaryTokens:
    """Tokens to compare on: T tokens, and which of them the policy sampled."""

    token_ids: list[int]
    """[T]"""
    sampled: npt.NDArray[np.bool_]
    """[T] Only these count: float32 itself errs by 1e-4 on a token the model finds impossible."""

    @classmethod
    def of(cls, trajectory: Trajectory, count: int) -> CanaryTokens | None:
        """Return a trajectory from its start to `count` tokens from its first sampled one on.

        The server that sampled it has cached its prefix under the older weights, so the comparison
        also finds a prefix that is used after its weights. All of them are of the first segment.
        None where nothing was sampled.
        """
        sampled = np.flatnonzero(trajectory.action_mask)
        if count < 1 or len(sampled) == 0:
            return None
        end = min(int(sampled[0]) + count, trajectory.segment_bounds()[0][1])
        return cls(trajectory.token_ids[:end].tolist(), trajectory.action_mask[:end])


def compare(
    learner_logprobs: npt.NDArray[np.float32],
    rollout_logprobs: list[float],
    sampled: npt.NDArray[np.bool_],
) -> CanaryReading:
    """Compare log-probabilities of the same tokens.

    Args:
        learner_logprobs: [T-1] of tokens 1 .. T-1.
        rollout_logprobs: [T-1] of the same tokens.
        sampled: [T-1] which of them count; at least one.

    Raises:
        CanaryError: the lengths differ, or a value is not finite.
    """
    rollout = np.asarray(rollout_logprobs, dtype=np.float64)
    learner = learner_logprobs.astype(np.float64)
    if rollout.shape != learner.shape:
        raise CanaryError(
            f"it gave {len(rollout)} log-probabilities, and the learner {len(learner)}"
        )
    difference = np.abs(rollout - learner)[sampled]
    if not np.all(np.isfinite(difference)):
        raise CanaryError("a log-probability is not finite")
    return CanaryReading(mean=float(difference.mean()), max=float(difference.max()))


def judge(
    reading: CanaryReading, bounds: CanaryBounds, floor: float | None
) -> tuple[Literal["ok", "warn", "fail"], str]:
    """Say whether a reading is within bounds, and what the bound is.

    Args:
        reading: the comparison.
        bounds: limits from the configuration.
        floor: mean |difference| at version 0 (the noise of the number format); None when this is
            that reading: in bfloat16 it has no bound then.
    """
    if bounds.dtype == "float32":
        text = (
            f"mean |dlogp| {reading.mean:.3g}, allowed {bounds.mean_dlogp:.3g} in float32 (max "
            f"{reading.max:.3g})"
        )
        return ("fail" if reading.mean > bounds.mean_dlogp else "ok"), text
    if floor is None:
        return "ok", f"mean |dlogp| {reading.mean:.3g}, the noise floor"
    limit = max(bounds.fail_factor * floor, bounds.mean_dlogp)
    text = (
        f"mean |dlogp| {reading.mean:.3g}, allowed {limit:.3g} in bfloat16 (noise floor "
        f"{floor:.3g}, max {reading.max:.3g})"
    )
    if reading.mean > limit:
        return "fail", text
    return ("warn" if reading.mean > bounds.warn_factor * floor else "ok"), text
