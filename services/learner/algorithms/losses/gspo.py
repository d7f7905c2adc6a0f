"""GSPO: one ratio for a whole trajectory, the geometric mean of its tokens' ratios.

Its bounds are far tighter than PPO's (the paper's are 3e-4 and 4e-4), since the mean varies less.

Source: arXiv:2507.18071; the sequence ratio is equation 7, the form per token section 4.3.
"""

from __future__ import annotations

import torch

from agent_r1.learner.algorithms.losses import LossInputs, LossOptions, PolicyLoss
from agent_r1.learner.algorithms.losses.ppo import clipped_policy_loss


def gspo_loss(inputs: LossInputs, options: LossOptions) -> PolicyLoss:
    """Clip the sequence ratio s = exp(mean of log p - log p_old), the same for all its tokens.

    Each token carries s * p / sg(p): the value of s, and a gradient through its own probability.
    With one advantage per trajectory and `aggregation = "sequence_mean"` that is the gradient of
    the loss of s itself.
    """
    log_ratio = (inputs.logprobs - inputs.old_logprobs).detach()
    sums_S = log_ratio.new_zeros(inputs.num_sequences).index_add_(0, inputs.sequences, log_ratio)
    counts_S = torch.bincount(inputs.sequences, minlength=inputs.num_sequences).clamp(min=1)
    means_N = (sums_S / counts_S)[inputs.sequences]
    # The bracket is 0 in value, so that the mean is not rounded.
    log_ratio_N = means_N + (inputs.logprobs - inputs.logprobs.detach())
    zeros = torch.zeros_like(means_N)
    return clipped_policy_loss(log_ratio_N, zeros, inputs.advantages, options)
