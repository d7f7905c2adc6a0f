"""GAE: how much better a token turned out than the critic expected (PPO with a critic).

train_samples.py --rewards, the critic's values--> here --advantages--> losses/ppo.py
                                                 --returns--> losses/value.py

Source: arXiv:1506.02438, equation 16; whitened advantages as in PPO implementations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageOptions, Advantages
from agent_r1.learner.algorithms.advantages.packing import gather, scatter, whiten


def generalized_advantages(
    rewards_P: npt.NDArray[np.float64], values_P: npt.NDArray[np.float64], options: AdvantageOptions
) -> npt.NDArray[np.float64]:
    """Return [P] A_t = delta_t + gamma lam A_{t+1}, with delta_t = r_t + gamma V_{t+1} - V_t.

    V and A after the last packed token are 0: a trajectory ends there.
    """
    next_value = next_advantage = 0.0
    advantages: list[float] = []
    for reward, value in zip(rewards_P[::-1].tolist(), values_P[::-1].tolist(), strict=True):
        delta = reward + options.gamma * next_value - value
        next_advantage = delta + options.gamma * options.lam * next_advantage
        next_value = value
        advantages.append(next_advantage)
    return np.array(advantages[::-1], dtype=np.float64)


def values_of(batch: AdvantageBatch, name: str) -> Sequence[npt.NDArray[np.floating]]:
    """Return [N][T] the critic's values, for the estimator `name`.

    Raises:
        ValueError: there are none.
    """
    if batch.values is None:
        raise ValueError(
            f'advantage = "{name}" needs the values of a critic and the batch has none; train with '
            "a critic or choose another estimator"
        )
    return batch.values


def gae_advantages(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    """Return whitened advantages, and as returns the advantages before whitening plus the values.

    Raises:
        ValueError: the batch has no values.
    """
    values = gather(values_of(batch, "gae"), batch.credit_masks)
    advantages = [
        generalized_advantages(rewards, values_P, options)
        for rewards, values_P in zip(
            gather(batch.token_rewards, batch.credit_masks), values, strict=True
        )
    ]
    returns = [a + v for a, v in zip(advantages, values, strict=True)]
    return Advantages(
        scatter(whiten(advantages), batch.credit_masks), scatter(returns, batch.credit_masks)
    )
