"""Rewards against those of the same group: what GRPO, RLOO and REINFORCE++-baseline share."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence


def apply_by_group(
    function: Callable[[list[float]], list[float]],
    rewards_N: Sequence[float],
    group_ids_N: Sequence[Hashable],
) -> list[float]:
    """Return [N] `function` of each group's rewards, back in the order of the batch."""
    members: dict[Hashable, list[int]] = {}
    for i, group_id in enumerate(group_ids_N):
        members.setdefault(group_id, []).append(i)
    results = [0.0] * len(rewards_N)
    for indices in members.values():
        found = function([rewards_N[i] for i in indices])
        for i, result in zip(indices, found, strict=True):
            results[i] = result
    return results


def center(rewards_G: Sequence[float]) -> list[float]:
    """Subtract the group's mean; the mean of a group of one counts as 0.

    Returns:
        [G] sums to 0 for two and more; exactly 0.0 when all of them are equal.

    Raises:
        ValueError: the group is empty, or a reward is not finite.
    """
    if not rewards_G:
        raise ValueError("a group of 0 rewards has no advantages; drop the group instead")
    for reward in rewards_G:
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward} is not finite; look at the reward components")
    if len(rewards_G) == 1:
        return [rewards_G[0]]
    # Equal rewards must give exactly 0.0, which rounding in the mean would not (3 x 0.1).
    if all(reward == rewards_G[0] for reward in rewards_G):
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]
