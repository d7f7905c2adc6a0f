"""What every advantage estimator takes and returns.

Dimension key: N = trajectories of one batch, T = tokens of one trajectory, G = group size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class AdvantageBatch:
    """Rewards of one batch of trajectories, token by token."""

    group_ids: Sequence[int]
    """[N] trajectories with equal ids answer the same prompt."""
    token_rewards: Sequence[npt.NDArray[np.floating]]
    """[N][T] reward of each token: process rewards on the token that closes a call, the outcome
    on the last action token; 0.0 where action_mask is False."""
    action_masks: Sequence[npt.NDArray[np.bool_]]
    """[N][T] True where the policy sampled the token."""

    def __post_init__(self) -> None:
        counts = {len(self.group_ids), len(self.token_rewards), len(self.action_masks)}
        if len(counts) != 1:
            raise ValueError(
                f"an advantage batch has {len(self.group_ids)} group ids, "
                f"{len(self.token_rewards)} reward arrays and {len(self.action_masks)} masks; "
                "they must be equally many"
            )
        for i, (rewards, mask) in enumerate(
            zip(self.token_rewards, self.action_masks, strict=True)
        ):
            if rewards.shape != mask.shape:
                raise ValueError(
                    f"trajectory {i} has {rewards.shape} rewards and a mask of {mask.shape}"
                )
            if np.any(rewards[~mask] != 0.0):
                raise ValueError(
                    f"trajectory {i} has a reward on a token the policy did not sample; put it on "
                    "the action token that caused it"
                )


class AdvantageEstimator(Protocol):
    """Turns rewards into advantages; 0.0 on every token that is not an action token."""

    def __call__(
        self, batch: AdvantageBatch, *, normalize_std: bool = True
    ) -> list[npt.NDArray[np.float32]]:
        """Return [N][T] advantages."""
        ...
