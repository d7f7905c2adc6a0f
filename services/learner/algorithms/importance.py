"""Correcting for a policy that sampled with other numbers than the learner computes.

The rollout engine and the learner disagree on log-probabilities (kernels, precision, staleness), so
what is called on-policy is not quite. Where the loss's ratio starts at the rollout's
log-probabilities, it corrects for that itself. Where it starts at the learner's, before the first
of several optimizer steps, the first ratio is 1, and the factor learner over rollout is missing:
`truncated_weights` multiplies token losses by it, cut at a cap. `keeps_sequence` drops trajectories
whose factor is far from 1 throughout.

Source: the two factors: J. Hilton et al., "Batch size-invariance for policy optimization",
arXiv:2110.00641, and for language models AReaL, arXiv:2505.24298, section 5.2. Truncated weights:
E. Ionides, "Truncated Importance Sampling", 2008; for language models: F. Yao et al., "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025. The mask on the geometric
mean: J. Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the
Training-Inference Mismatch", 2025.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

LOG_RATIO_BOUND = 20.0
"""Log-ratios are limited to +-20 before exp(), so that it stays finite for an outlier."""


def truncated_weights(
    learner_logprobs_T: npt.NDArray[np.floating],
    rollout_logprobs_T: npt.NDArray[np.floating],
    cap: float,
) -> npt.NDArray[np.float32]:
    """Return [T] min(exp(learner - rollout), cap): each token's importance weight, truncated.

    Args:
        learner_logprobs_T: [T] log-probabilities the learner computes, nats.
        rollout_logprobs_T: [T] log-probabilities at sampling, nats.
        cap: largest weight; above 0.
    """
    log_ratios = np.subtract(learner_logprobs_T, rollout_logprobs_T, dtype=np.float64)
    bounded = np.clip(log_ratios, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return np.minimum(np.exp(bounded), cap).astype(np.float32)


def keeps_sequence(
    learner_logprobs_T: npt.NDArray[np.floating],
    rollout_logprobs_T: npt.NDArray[np.floating],
    low: float,
    high: float,
) -> bool:
    """Return whether the geometric mean of the tokens' ratios lies within [low, high].

    Args:
        learner_logprobs_T: [T] the learner's log-probabilities of one trajectory's sampled tokens.
        rollout_logprobs_T: [T] theirs at sampling, nats; at least one.
        low: smallest mean ratio that is kept, at most 1.
        high: largest mean ratio that is kept, at least 1.
    """
    log_ratios = np.subtract(learner_logprobs_T, rollout_logprobs_T, dtype=np.float64)
    mean = math.fsum(log_ratios) / len(log_ratios)
    return low <= math.exp(min(max(mean, -LOG_RATIO_BOUND), LOG_RATIO_BOUND)) <= high
