"""GAE over turns: a turn is the action, and the critic values the state before each turn.

train_samples.py --rewards, the critic's values--> here --advantages--> losses/ppo.py
                                                 --returns--> losses/value.py

Where every turn has one token, it is gae.py.

Source: Turn-PPO, arXiv:2512.17008; GAE, arXiv:1506.02438, equation 16.
"""

from __future__ import annotations

import numpy as np

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageOptions, Advantages
from agent_r1.learner.algorithms.advantages.gae import generalized_advantages, values_of
from agent_r1.learner.algorithms.advantages.packing import whiten
from agent_r1.learner.algorithms.advantages.turns import spread_turns, turn_rewards, turns_of


def turn_gae_advantages(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    """Give every credited token of a turn that turn's advantage, whitened over all turns.

    gamma and lam count turns. The critic learns at the first token of each turn, and nowhere else.

    Raises:
        ValueError: the batch has no values, or no turns.
    """
    starts = turns_of(batch, "turn_gae")
    rewards = turn_rewards(batch, starts)
    values = [
        np.asarray(values_T, np.float64)[starts_K]
        for values_T, starts_K in zip(values_of(batch, "turn_gae"), starts, strict=True)
    ]
    advantages = [
        generalized_advantages(np.array(rewards_K), values_K, options)
        for rewards_K, values_K in zip(rewards, values, strict=True)
    ]
    returns = [np.zeros(mask.shape, np.float32) for mask in batch.credit_masks]
    value_masks = [np.zeros_like(mask) for mask in batch.credit_masks]
    for i, starts_K in enumerate(starts):
        returns[i][starts_K] = advantages[i] + values[i]
        value_masks[i][starts_K] = True
    whitened = [numbers_K.tolist() for numbers_K in whiten(advantages)]
    return Advantages(spread_turns(whitened, starts, batch.credit_masks), returns, value_masks)
