"""GRPO: a trajectory is as good as it is better than the others of its group.

train.py --rewards of one batch--> here --advantages--> losses/ppo.py.

Source: DeepSeekMath, arXiv:2402.03300, section 4.1; without the std, Dr. GRPO, arXiv:2503.20783.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agent_r1.learner.algorithms.advantages import AdvantageBatch


def group_relative_advantages(
    rewards_G: Sequence[float], *, normalize_std: bool = True, eps: float = 1e-6
) -> list[float]:
    """Center rewards within one group, and optionally scale by their spread (GRPO).

    Args:
        rewards_G: [G] one scalar reward per trajectory.
        normalize_std: divide by the sample std, n - 1 (GRPO); False is Dr. GRPO.
        eps: added to the std, in reward units.

    Returns:
        [G] advantages that sum to 0; all 0.0 when every reward is equal.

    Raises:
        ValueError: the group is empty, or a reward is not finite.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1; Dr. GRPO, arXiv:2503.20783.
    """
    if not rewards_G:
        raise ValueError("a group of 0 rewards has no advantages; drop the group instead")
    for reward in rewards_G:
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward} is not finite; look at the reward components")
    # Equal rewards must give exactly 0.0, which rounding in the mean would not (3 x 0.1).
    if all(reward == rewards_G[0] for reward in rewards_G):
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    centered = [reward - mean for reward in rewards_G]
    if not normalize_std:
        return centered
    std = math.sqrt(math.fsum(x * x for x in centered) / (len(rewards_G) - 1))
    return [x / (std + eps) for x in centered]


def grpo_advantages(
    batch: AdvantageBatch, *, normalize_std: bool = True
) -> list[npt.NDArray[np.float32]]:
    """Give every action token of a trajectory its group-relative advantage.

    The reward of a trajectory is the sum of its token rewards, process rewards included.

    Returns:
        [N][T] the same advantage on every action token, exactly 0.0 elsewhere.
    """
    members: dict[int, list[int]] = {}
    for i, group_id in enumerate(batch.group_ids):
        members.setdefault(group_id, []).append(i)
    totals = [float(rewards.sum(dtype=np.float64)) for rewards in batch.token_rewards]
    advantages: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(totals)
    for indices in members.values():
        scalars = group_relative_advantages(
            [totals[i] for i in indices], normalize_std=normalize_std
        )
        for i, scalar in zip(indices, scalars, strict=True):
            mask = batch.action_masks[i]
            advantages[i] = np.where(mask, scalar, 0.0).astype(np.float32)
    return advantages
