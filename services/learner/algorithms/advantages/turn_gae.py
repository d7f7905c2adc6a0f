"""GAE over turns: a turn is the action, and the critic values the state before each turn.

train_samples.py --rewards, the critic's values--> here --advantages--> losses/ppo.py
                                                 --returns--> losses/value.py

Where every turn has one token, it is gae.py.

Source: Turn-PPO, arXiv:2512.17008; GAE, arXiv:1506.02438, equation 16.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageEstimator, Advantages
from agent_r1.learner.algorithms.advantages.gae import generalized_advantages
from agent_r1.learner.algorithms.advantages.packing import whiten
from agent_r1.learner.algorithms.advantages.turns import spread_turns, turn_rewards


class TurnGae(AdvantageEstimator):
    """Gives every credited token of a turn that turn's advantage, whitened over all turns.

    The critic learns at the first token of each turn, and nowhere else.
    """

    gamma: float = 1.0
    """Discount per turn."""
    lam: float = 1.0
    """Lambda of GAE, from 0 (bootstrapped) to 1 (reward-to-go minus value)."""
    needs_critic: ClassVar[bool] = True
    credit: ClassVar = "turn"

    def __call__(self, batch: AdvantageBatch) -> Advantages:
        """Return the advantages and returns of a batch, and where the critic learns."""
        assert batch.values is not None
        starts = batch.turn_starts
        values = [
            np.asarray(values_T, np.float64)[starts_K]
            for values_T, starts_K in zip(batch.values, starts, strict=True)
        ]
        advantages = [
            generalized_advantages(np.array(rewards_K), values_K, self.gamma, self.lam)
            for rewards_K, values_K in zip(turn_rewards(batch), values, strict=True)
        ]
        returns = [np.zeros(mask.shape, np.float32) for mask in batch.credit_masks]
        value_masks = [np.zeros_like(mask) for mask in batch.credit_masks]
        for i, starts_K in enumerate(starts):
            returns[i][starts_K] = advantages[i] + values[i]
            value_masks[i][starts_K] = True
        whitened = [numbers_K.tolist() for numbers_K in whiten(advantages)]
        return Advantages(spread_turns(whitened, batch), returns, value_masks)
