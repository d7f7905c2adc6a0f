"""REINFORCE++-baseline: rewards centered within each group, then whitened over the batch.

Unlike GRPO's, its scale is the batch's, so that a group of nearly equal rewards stays small.

Source: REINFORCE++, arXiv:2501.03262.
"""

from __future__ import annotations

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageOptions, Advantages
from agent_r1.learner.algorithms.advantages.groups import (
    center,
    compare_trajectories,
    trajectory_rewards,
)
from agent_r1.learner.algorithms.advantages.packing import scatter, spread, whiten


def reinforce_pp_baseline_advantages(
    batch: AdvantageBatch, options: AdvantageOptions
) -> Advantages:
    """Whiten R - mean of the group, over all credited tokens; long trajectories weigh more."""
    del options  # the formula has no settings
    scalars = compare_trajectories(center, trajectory_rewards(batch), batch)
    return Advantages(scatter(whiten(spread(scalars, batch.credit_masks)), batch.credit_masks))
