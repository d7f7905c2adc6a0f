"""Rejection-sampling fine-tuning as an advantage, for the table of methods.

A step trains on the right trajectories of its batch, each token with the weight 1, and on nothing
else: maximum likelihood on what the policy itself got right. Since sampling and training alternate
at every step, it is the online form.

Source: RAFT, arXiv:2304.06767; Scaling Relationship on Learning Mathematical Reasoning,
arXiv:2308.01825, section 3.3.
"""

from agent_r1.learner.algorithms.advantages import (
    AdvantageBatch,
    AdvantageEstimator,
    Advantages,
)
from agent_r1.learner.algorithms.advantages.packing import scatter, spread, total_rewards

RIGHT_ABOVE = 0.5
"""A trajectory is right where its reward is above this."""


class AcceptedAdvantages(AdvantageEstimator):
    """Gives every credited token 1 where the trajectory is right, and 0 elsewhere."""

    def __call__(self, batch: AdvantageBatch) -> Advantages:
        """Return the advantages of a batch."""
        totals = total_rewards(batch.token_rewards, batch.credit_masks)
        accepted = [float(total > RIGHT_ABOVE) for total in totals]
        return Advantages(scatter(spread(accepted, batch.credit_masks), batch.credit_masks))
