"""Per-token estimators of the KL divergence between the policy and its reference.

The engine adds them to the loss, or train_samples.py takes them off the rewards, as `learner.kl`
says.

Source: J. Schulman, "Approximating KL Divergence", 2020 (k1, k2, k3); k3 in GRPO: DeepSeekMath,
arXiv:2402.03300, equation 4.
"""

from __future__ import annotations

from typing import Literal

import torch

from agent_r1.learner.algorithms.importance import LOG_RATIO_BOUND

KlEstimator = Literal["k1", "abs", "k2", "k3"]

K3_BOUND = 10.0
"""The k3 estimate is limited to +-10, so that no single token rules the loss."""


def kl_per_token(
    logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor, estimator: KlEstimator
) -> torch.Tensor:
    """Estimate KL(policy || reference) at each sampled token, with d = log p - log p_ref.

    Args:
        logprobs_N: [N] learner log-probabilities, nats; gradient flows through them.
        ref_logprobs_N: [N] log-probabilities under the reference.
        estimator: k1 is d, unbiased in value, with a gradient (of log p) that is 0 on average: for
            rewards, not for the loss; abs is |d|, biased, never negative; k2 is d^2 / 2, whose
            gradient is unbiased on-policy; k3 is exp(-d) + d - 1, unbiased in value, never
            negative, of low variance.

    Returns:
        [N] estimates, nats.
    """
    difference = logprobs_N - ref_logprobs_N
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference * difference
    bounded = torch.clamp(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.clamp(torch.exp(-bounded) + bounded - 1.0, -K3_BOUND, K3_BOUND)
