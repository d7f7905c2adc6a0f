"""Rewards and advantages by turn: what estimators share whose action is a turn of the model.

Dimension key beside that of the package: K = turns of one trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from agent_r1.learner.algorithms.advantages import AdvantageBatch
from agent_r1.learner.algorithms.advantages.groups import apply_by_group
from agent_r1.learner.algorithms.advantages.grpo import group_relative_advantages
from agent_r1.learner.algorithms.advantages.packing import scatter


def turn_rewards(batch: AdvantageBatch) -> list[list[float]]:
    """Return [N][K] the sum of each turn's token rewards."""
    return [
        [math.fsum(turn) for turn in np.split(np.asarray(rewards, np.float64), starts_K)[1:]]
        for rewards, starts_K in zip(batch.token_rewards, batch.turn_starts, strict=True)
    ]


def spread_turns(
    numbers: Sequence[Sequence[float]], batch: AdvantageBatch
) -> list[npt.NDArray[np.float32]]:
    """Return [N][T] each turn's number on all of its credited tokens, 0.0 elsewhere."""
    masks = batch.credit_masks
    return scatter(
        [
            np.asarray(numbers_K, np.float64)[
                np.searchsorted(starts_K, np.flatnonzero(mask), side="right") - 1
            ]
            for numbers_K, starts_K, mask in zip(numbers, batch.turn_starts, masks, strict=True)
        ],
        masks,
    )


def compare_turns(
    rewards: Sequence[float], keys: Sequence[Hashable], *, normalize_std: bool
) -> list[float]:
    """Return each reward against those with an equal key, as GRPO compares a group.

    A reward alone under its key has 0.0: there is nothing to compare it with.
    """

    def relative(rewards_G: list[float]) -> list[float]:
        if len(rewards_G) == 1:
            return [0.0]
        return group_relative_advantages(rewards_G, normalize_std=normalize_std)

    return apply_by_group(relative, rewards, keys)
