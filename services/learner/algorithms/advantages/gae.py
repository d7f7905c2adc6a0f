"""GAE: how much better a token turned out than the critic expected (PPO with a critic).

train_samples.py --rewards, the critic's values--> here --advantages--> losses/ppo.py
                                                 --returns--> losses/value.py

Source: arXiv:1506.02438, equation 16; whitened advantages as in PPO implementations.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageEstimator, Advantages
from agent_r1.learner.algorithms.advantages.packing import gather, scatter, whiten


def generalized_advantages(
    rewards_P: npt.NDArray[np.float64], values_P: npt.NDArray[np.float64], gamma: float, lam: float
) -> npt.NDArray[np.float64]:
    """Return [P] A_t = delta_t + gamma lam A_{t+1}, with delta_t = r_t + gamma V_{t+1} - V_t.

    V and A after the last packed token are 0: a trajectory ends there.
    """
    next_value = next_advantage = 0.0
    advantages: list[float] = []
    for reward, value in zip(rewards_P[::-1].tolist(), values_P[::-1].tolist(), strict=True):
        delta = reward + gamma * next_value - value
        next_advantage = delta + gamma * lam * next_advantage
        next_value = value
        advantages.append(next_advantage)
    return np.array(advantages[::-1], dtype=np.float64)


class Gae(AdvantageEstimator):
    """Whitened advantages; returns are the advantages before whitening plus the values."""

    gamma: float = 1.0
    """Discount per packed token."""
    lam: float = 1.0
    """Lambda of GAE, from 0 (bootstrapped) to 1 (reward-to-go minus value)."""
    needs_critic: ClassVar[bool] = True

    def __call__(self, batch: AdvantageBatch) -> Advantages:
        """Return the advantages and returns of a batch."""
        assert batch.values is not None
        values = gather(batch.values, batch.credit_masks)
        advantages = [
            generalized_advantages(rewards, values_P, self.gamma, self.lam)
            for rewards, values_P in zip(
                gather(batch.token_rewards, batch.credit_masks), values, strict=True
            )
        ]
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        return Advantages(
            scatter(whiten(advantages), batch.credit_masks), scatter(returns, batch.credit_masks)
        )
