"""REINFORCE: the plain policy gradient, without a ratio.

Source: R. Williams, "Simple statistical gradient-following algorithms", 1992.
"""

from __future__ import annotations

import torch

from agent_r1.learner.algorithms.losses import (
    LossInputs,
    LossOptions,
    PolicyLoss,
    probability_ratio,
)


def reinforce_loss(inputs: LossInputs, options: LossOptions) -> PolicyLoss:
    """Compute -A log p for each token; the ratio is reported, not used."""
    del options  # the formula has no settings
    ratio = probability_ratio(inputs.logprobs, inputs.old_logprobs).detach()
    loss = -inputs.advantages * inputs.logprobs
    return PolicyLoss(loss, torch.zeros_like(ratio, dtype=torch.bool), ratio)
