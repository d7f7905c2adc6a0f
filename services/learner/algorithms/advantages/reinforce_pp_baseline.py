"""REINFORCE++-baseline: rewards centered within each group, then whitened over the batch.

Unlike GRPO's, its scale is the batch's, so that a group of nearly equal rewards stays small.

Source: REINFORCE++, arXiv:2501.03262.
"""

from __future__ import annotations

from typing import ClassVar

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageEstimator, Advantages
from agent_r1.learner.algorithms.advantages.groups import (
    center,
    compare_trajectories,
    trajectory_rewards,
)
from agent_r1.learner.algorithms.advantages.packing import scatter, spread, whiten


class ReinforcePPBaseline(AdvantageEstimator):
    """Whitens R - mean of the group, over all credited tokens; long trajectories weigh more."""

    compares_group: ClassVar[bool] = True
    credit: ClassVar = "trajectory"
    # Whitening subtracts the mean of all tokens: not 0 where trajectories differ in length.

    def __call__(self, batch: AdvantageBatch) -> Advantages:
        """Return the advantages of a batch."""
        scalars = compare_trajectories(center, trajectory_rewards(batch), batch)
        packed = whiten(spread(scalars, batch.credit_masks))
        return Advantages(scatter(packed, batch.credit_masks))
