"""The canary: tests whether rollout servers sample with the weights the learner thinks they have.

train.py chooses trajectories of the batch here; publisher.py asks the learner and the servers for
log-probabilities of the tokens of highest entropy in them, and compares. Pure: the choice, bounds
and verdicts only.

The mean over the chosen tokens is judged, not the maximum: where attention is close to a tie,
float32 itself moves one token in some ten thousand by more than 1e-4 with equal weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from agent_r1.learner.engine.interface import FloatArray, Predictions, TrainSample
from agent_r1.learner.engine.microbatches import scoring_sample
from agent_r1.runtime.config import Dtype
from agent_r1_proto.trajectory import Trajectory
from agent_r1_proto.weights import CanaryRequest

MEAN_DLOGP: dict[Dtype, float] = {"float32": 2e-5, "bfloat16": 0.05}
"""Mean |difference| allowed by default, in nats; measurements are in docs/benchmarks.md."""


class CanaryError(RuntimeError):
    """A rollout server does not sample with the weights that were published."""


@dataclass(frozen=True)
class CanaryBounds:
    """Bounds on the difference between the log-probabilities of learner and rollout."""

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
class CanaryPrompt:
    """The beginning of a trajectory, which servers score, and the tokens that are compared."""

    token_ids: list[int]
    """[T] up to the last chosen token."""
    chosen: npt.NDArray[np.int64]
    """[N] positions of the chosen tokens, at least one."""
    logprobs: FloatArray
    """[N] the learner's log-probabilities of them."""


def canary_samples(
    trajectories: Sequence[Trajectory], count: int, max_context: int
) -> list[TrainSample]:
    """Choose the trajectories of a batch that the canary takes its tokens from.

    They are those whose sampled tokens were the least expected on average: minus the
    log-probability of a sampled token estimates the policy's entropy there, and costs nothing.

    Args:
        trajectories: the batch.
        count: most trajectories.
        max_context: of the model; a server scores one token less.

    Returns:
        The first segment of each, whose sampled tokens count, at temperature 1 as servers score.
    """
    masks = [_sampled(trajectory, max_context - 1) for trajectory in trajectories]
    logprobs = [
        trajectory.rollout_logprobs[: len(mask)][mask].mean() if mask.any() else np.inf
        for trajectory, mask in zip(trajectories, masks, strict=True)
    ]
    chosen = [i for i in np.argsort(logprobs, kind="stable")[:count] if masks[i].any()]
    return [_scored_sample(trajectories[i], masks[i]) for i in chosen]


def _sampled(trajectory: Trajectory, most_tokens: int) -> npt.NDArray[np.bool_]:
    end = min(trajectory.segment_bounds()[0][1], most_tokens)
    mask = trajectory.action_mask[:end].copy()
    mask[:1] = False  # nothing predicts the first token
    return mask


def _scored_sample(trajectory: Trajectory, sampled: npt.NDArray[np.bool_]) -> TrainSample:
    sample = scoring_sample(trajectory.token_ids[: len(sampled)], 1.0)
    return replace(sample, loss_mask=sampled)


def choose_tokens(
    samples: Sequence[TrainSample], predictions: Sequence[Predictions], count: int
) -> list[CanaryPrompt]:
    """Choose the sampled tokens at which the policy's entropy is highest.

    A step hardly changes the log-probability of a token that the policy is sure of. The least
    likely tokens change as well, but there float32 itself errs by 1e-4.

    Args:
        samples: [K] of `canary_samples`, at least one.
        predictions: [K] the learner's, with the weights that are compared.
        count: most tokens, over all samples.

    Returns:
        A prompt for each sample that has chosen tokens.
    """
    sampled = np.concatenate([sample.loss_mask for sample in samples])
    entropies = np.concatenate([prediction.entropies for prediction in predictions])
    marks = np.zeros(len(sampled), np.bool_)
    marks[np.argsort(np.where(sampled, -entropies, np.inf), kind="stable")[:count]] = True
    ends = np.cumsum([sample.num_tokens for sample in samples])
    pieces = zip(samples, predictions, np.split(marks & sampled, ends[:-1]), strict=True)
    return [_prompt(*piece) for piece in pieces if piece[2].any()]


def _prompt(
    sample: TrainSample, prediction: Predictions, marks: npt.NDArray[np.bool_]
) -> CanaryPrompt:
    chosen = np.flatnonzero(marks)
    end = int(chosen[-1]) + 1
    return CanaryPrompt(sample.token_ids[:end].tolist(), chosen, prediction.logprobs[chosen])


def canary_request(prompts: Sequence[CanaryPrompt]) -> CanaryRequest:
    """Ask for the log-probabilities of the chosen tokens of all prompts."""
    starts = np.cumsum([0, *(len(prompt.token_ids) for prompt in prompts)])[:-1]
    wanted = [start + prompt.chosen for start, prompt in zip(starts, prompts, strict=True)]
    return CanaryRequest(
        token_ids=[token for prompt in prompts for token in prompt.token_ids],
        prompt_starts=starts[1:].tolist(),
        wanted=np.concatenate(wanted).tolist(),
    )


def compare(prompts: Sequence[CanaryPrompt], answer: Sequence[float]) -> CanaryReading:
    """Compare a server's log-probabilities of the chosen tokens with the learner's.

    Args:
        prompts: what was asked; N chosen tokens, at least one.
        answer: [N] the server's.

    Raises:
        CanaryError: the answer has another length, or a value is not finite.
    """
    learner = np.concatenate([prompt.logprobs for prompt in prompts]).astype(np.float64)
    if len(answer) != len(learner):
        raise CanaryError(
            f"it gave {len(answer)} log-probabilities, and the learner {len(learner)}"
        )
    difference = np.abs(np.asarray(answer, np.float64) - learner)
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
