"""CISPO: the clipped ratio only weighs REINFORCE, so that no token loses its gradient.

Source: MiniMax-M1, arXiv:2506.13585, section 3.1. The paper bounds the ratio above only; clip_low =
1 does so here, since a ratio is never below 0.
"""

from __future__ import annotations

import torch

from agent_r1.learner.algorithms.losses import (
    LossInputs,
    LossOptions,
    PolicyLoss,
    probability_ratio,
)


def cispo_loss(inputs: LossInputs, options: LossOptions) -> PolicyLoss:
    """Compute -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log p for each token."""
    ratio = probability_ratio(inputs.logprobs, inputs.old_logprobs).detach()
    weight = torch.clamp(ratio, 1.0 - options.clip_low, 1.0 + options.clip_high)
    return PolicyLoss(-weight * inputs.advantages * inputs.logprobs, weight != ratio, ratio)
