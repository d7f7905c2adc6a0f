"""REINFORCE++: the reward-to-go of each token, whitened over the batch.

Source: REINFORCE++, arXiv:2501.03262.
"""

from __future__ import annotations

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageOptions, Advantages
from agent_r1.learner.algorithms.advantages.packing import gather, rewards_to_go, scatter, whiten


def reinforce_pp_advantages(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    """Whiten G_t = sum of gamma^(k-t) r_k over k >= t, with t and k counting credited tokens."""
    returns = [
        rewards_to_go(rewards, options.gamma)
        for rewards in gather(batch.token_rewards, batch.credit_masks)
    ]
    return Advantages(scatter(whiten(returns), batch.credit_masks))
