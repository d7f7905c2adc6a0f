"""GRPO: a trajectory is as good as it is better than the others of its group.

train_samples.py --rewards of one batch--> here --advantages--> a loss of losses/.

Source: DeepSeekMath, arXiv:2402.03300, section 4.1; without the std, Dr. GRPO, arXiv:2503.20783.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageEstimator, Advantages
from agent_r1.learner.algorithms.advantages.groups import (
    center,
    compare_trajectories,
    trajectory_rewards,
)
from agent_r1.learner.algorithms.advantages.packing import scatter, spread


def group_relative_advantages(
    rewards_G: Sequence[float], *, normalize_std: bool = True, eps: float = 1e-6
) -> list[float]:
    """Center rewards within one group, and optionally scale by their spread (GRPO).

    Args:
        rewards_G: [G] one scalar reward per trajectory.
        normalize_std: divide by the sample std, n - 1 (GRPO); False is Dr. GRPO.
        eps: added to the std, in reward units.

    Returns:
        [G] advantages that sum to 0; all 0.0 when every reward is equal. A group of one has mean 0
        and std 1: nothing to compare with, so its reward stays.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1; Dr. GRPO, arXiv:2503.20783.
    """
    centered = center(rewards_G)
    if not normalize_std:
        return centered
    if len(centered) == 1:
        return [centered[0] / (1.0 + eps)]
    std = math.sqrt(math.fsum(x * x for x in centered) / (len(centered) - 1))
    return [x / (std + eps) for x in centered]


class Grpo(AdvantageEstimator):
    """Gives every credited token of a trajectory its group-relative advantage.

    The reward of a trajectory is the sum of its token rewards, process rewards included.
    """

    normalize_std: bool = True
    """Divide by the group's sample std; False is Dr. GRPO."""
    compares_group: ClassVar[bool] = True
    credit: ClassVar = "trajectory"
    zero_when_equal: ClassVar[bool] = True

    def __call__(self, batch: AdvantageBatch) -> Advantages:
        """Return the advantages of a batch."""
        relative = partial(group_relative_advantages, normalize_std=self.normalize_std)
        scalars = compare_trajectories(relative, trajectory_rewards(batch), batch)
        return Advantages(scatter(spread(scalars, batch.credit_masks), batch.credit_masks))
