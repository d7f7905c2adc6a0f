"""Rewards against those of the same group: what GRPO, RLOO and REINFORCE++-baseline share."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

from agent_r1.learner.algorithms.advantages import AdvantageBatch
from agent_r1.learner.algorithms.advantages.packing import total_rewards


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


def compare_trajectories(
    function: Callable[[list[float]], list[float]],
    rewards_N: Sequence[float],
    batch: AdvantageBatch,
) -> list[float]:
    """Return [N] `function` of each group's rewards, one per trajectory: that of its first row.

    Every row of a trajectory gets what the trajectory gets.
    """
    if batch.lineages is None:
        return apply_by_group(function, rewards_N, batch.group_ids)
    first_row: dict[int, int] = {}
    for i, row in enumerate(batch.lineages):
        first_row.setdefault(row.trajectory, i)
    found = apply_by_group(
        function,
        [rewards_N[i] for i in first_row.values()],
        [batch.group_ids[i] for i in first_row.values()],
    )
    by_trajectory = dict(zip(first_row, found, strict=True))
    return [by_trajectory[row.trajectory] for row in batch.lineages]


def trajectory_rewards(batch: AdvantageBatch) -> list[float]:
    """Return [N] the sum of all rewards of each row's trajectory; the outcome counts once."""
    totals = total_rewards(batch.token_rewards, batch.credit_masks)
    if batch.lineages is None:
        return totals
    counted: dict[int, list[float]] = {}
    for row, total in zip(batch.lineages, totals, strict=True):
        own = counted.setdefault(row.trajectory, [])
        own.append(total - row.outcome if own else total)
    return [math.fsum(counted[row.trajectory]) for row in batch.lineages]


def center(rewards_G: Sequence[float]) -> list[float]:
    """Subtract the group's mean; the mean of a group of one counts as 0.

    Returns:
        [G] sums to 0 for two and more; exactly 0.0 when all of them are equal.
    """
    if len(rewards_G) == 1:
        return [rewards_G[0]]
    # Equal rewards must give exactly 0.0, which rounding in the mean would not (3 x 0.1).
    if all(reward == rewards_G[0] for reward in rewards_G):
        return [0.0] * len(rewards_G)
    mean = math.fsum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]
