"""Bringing process rewards to a common scale before the outcome is added.

train_samples.py --process rewards per token--> here --normalized--> AdvantageBatch.token_rewards

Source: PRIME, arXiv:2502.01456, whose code divides by the batch's largest return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from agent_r1.learner.algorithms.advantages.packing import rewards_to_go

ProcessRewardScope = Literal["none", "batch", "trajectory"]


def normalize_process_rewards(
    rewards: Sequence[npt.NDArray[np.floating]],
    scope: ProcessRewardScope,
    lineages: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> list[npt.NDArray[np.float64]]:
    """Divide process rewards so that no return built from them alone exceeds 1 in size.

    Args:
        rewards: [N][T] process reward of each token, 0.0 on most of them.
        scope: "batch" divides all trajectories by one number, the largest |reverse cumulative sum|
            of any token; "trajectory" divides each by its own; "none" changes nothing.
        lineages: [N] half-open token ranges that no return crosses; None: each trajectory is one.

    Returns:
        [N][T] new arrays; rewards that are all zero stay zero.
    """
    copies = [np.array(array, dtype=np.float64) for array in rewards]
    if scope == "none":
        return copies
    ranges = lineages or [[(0, len(array))] for array in copies]
    peaks = [
        max(_peak(array[start:end]) for start, end in bounds)
        for array, bounds in zip(copies, ranges, strict=True)
    ]
    if scope == "batch":
        peaks = [max(peaks, default=0.0)] * len(copies)
    return [array / peak if peak > 0 else array for array, peak in zip(copies, peaks, strict=True)]


def _peak(rewards: npt.NDArray[np.float64]) -> float:
    return float(np.max(np.abs(rewards_to_go(rewards, 1.0)), initial=0.0))
