"""RLOO: a trajectory's reward minus the mean reward of the others of its group.

Source: "Back to Basics", arXiv:2402.14740, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageOptions, Advantages
from agent_r1.learner.algorithms.advantages.groups import (
    center,
    compare_trajectories,
    trajectory_rewards,
)
from agent_r1.learner.algorithms.advantages.packing import scatter, spread


def leave_one_out_advantages(rewards_G: Sequence[float]) -> list[float]:
    """Return [G] R n/(n-1) - mean n/(n-1), which is R minus the mean of the other n - 1.

    A group of one has no others: its reward stays.

    Raises:
        ValueError: the group is empty, or a reward is not finite.
    """
    n = len(rewards_G)
    return [x * n / (n - 1) if n > 1 else x for x in center(rewards_G)]


def rloo_advantages(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    """Give every credited token of a trajectory its leave-one-out advantage."""
    del options  # the formula has no settings
    scalars = compare_trajectories(leave_one_out_advantages, trajectory_rewards(batch), batch)
    return Advantages(scatter(spread(scalars, batch.credit_masks), batch.credit_masks))
