"""RLOO: a trajectory's reward minus the mean reward of the others of its group.

Source: "Back to Basics", arXiv:2402.14740, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageEstimator, Advantages
from agent_r1.learner.algorithms.advantages.groups import (
    center,
    compare_trajectories,
    trajectory_rewards,
)
from agent_r1.learner.algorithms.advantages.packing import scatter, spread


def leave_one_out_advantages(rewards_G: Sequence[float]) -> list[float]:
    """Return [G] R n/(n-1) - mean n/(n-1), which is R minus the mean of the other n - 1.

    A group of one has no others: its reward stays.
    """
    n = len(rewards_G)
    return [x * n / (n - 1) if n > 1 else x for x in center(rewards_G)]


class Rloo(AdvantageEstimator):
    """Gives every credited token of a trajectory its leave-one-out advantage."""

    compares_group: ClassVar[bool] = True
    credit: ClassVar = "trajectory"
    zero_when_equal: ClassVar[bool] = True

    def __call__(self, batch: AdvantageBatch) -> Advantages:
        """Return the advantages of a batch."""
        scalars = compare_trajectories(leave_one_out_advantages, trajectory_rewards(batch), batch)
        return Advantages(scatter(spread(scalars, batch.credit_masks), batch.credit_masks))
