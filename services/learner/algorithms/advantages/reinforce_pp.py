"""REINFORCE++: the reward-to-go of each token, whitened over the batch.

Source: REINFORCE++, arXiv:2501.03262.
"""

from __future__ import annotations

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageEstimator, Advantages
from agent_r1.learner.algorithms.advantages.packing import gather, rewards_to_go, scatter, whiten


class ReinforcePP(AdvantageEstimator):
    """Whitens G_t = sum of gamma^(k-t) r_k over k >= t, with t and k counting credited tokens."""

    gamma: float = 1.0
    """Discount per packed token."""

    def __call__(self, batch: AdvantageBatch) -> Advantages:
        """Return the advantages of a batch."""
        returns = [
            rewards_to_go(rewards, self.gamma)
            for rewards in gather(batch.token_rewards, batch.credit_masks)
        ]
        return Advantages(scatter(whiten(returns), batch.credit_masks))
