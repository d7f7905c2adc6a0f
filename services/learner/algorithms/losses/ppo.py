"""PPO's clipped policy loss, with separate bounds below and above, and optional dual clip.

The engine calls it on the trained tokens of one micro-batch; aggregation.py says what each weighs.

Source: PPO, arXiv:1707.06347, section 3; asymmetric bounds: DAPO, arXiv:2503.14476, section 3.1;
dual clip: arXiv:1912.09729, section 4.3.
"""

from __future__ import annotations

import torch

from agent_r1.learner.algorithms.losses import (
    LossInputs,
    LossOptions,
    PolicyLoss,
    probability_ratio,
)


def clipped_policy_loss(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    options: LossOptions,
) -> PolicyLoss:
    """Compute max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) for each token.

    Args:
        logprobs_N: [N] learner log-probabilities, nats; gradient flows through them.
        old_logprobs_N: [N] the ratio's denominator, nats.
        advantages_N: [N] advantages.
        options: the bounds.
    """
    ratio = probability_ratio(logprobs_N, old_logprobs_N)
    plain = -advantages_N * ratio
    near = torch.clamp(ratio, 1.0 - options.clip_low, 1.0 + options.clip_high)
    bounded = -advantages_N * near
    clipped = bounded > plain
    loss = torch.maximum(plain, bounded)
    if options.dual_clip is not None:
        ceiling = -options.dual_clip * advantages_N
        capped = (advantages_N < 0) & (loss > ceiling)
        loss = torch.where(capped, ceiling, loss)
        clipped = clipped | capped
    return PolicyLoss(loss, clipped.detach(), ratio.detach())


def ppo_loss(inputs: LossInputs, options: LossOptions) -> PolicyLoss:
    """Clip the ratio of each token by itself."""
    return clipped_policy_loss(inputs.logprobs, inputs.old_logprobs, inputs.advantages, options)
