"""ReMax: the reward-to-go minus the reward of the greedy answer to the same prompt.

Source: ReMax, arXiv:2310.10505, section 4.
"""

from __future__ import annotations

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageOptions, Advantages
from agent_r1.learner.algorithms.advantages.packing import gather, rewards_to_go, scatter


def remax_advantages(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    """Return G_t - R(greedy) on every credited token.

    Raises:
        ValueError: the batch has no greedy rewards.
    """
    if batch.greedy_rewards is None:
        raise ValueError(
            'advantage = "remax" needs the reward of a greedy answer to every prompt and the batch '
            "has none; sample greedy answers or choose another estimator"
        )
    packed = gather(batch.token_rewards, batch.credit_masks)
    advantages = [
        rewards_to_go(rewards, options.gamma) - greedy
        for rewards, greedy in zip(packed, batch.greedy_rewards, strict=True)
    ]
    return Advantages(scatter(advantages, batch.credit_masks))
