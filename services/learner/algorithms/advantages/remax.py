"""ReMax: the reward-to-go minus that of the greedy answer to the same prompt.

Source: ReMax, arXiv:2310.10505, section 4, whose reward comes with the last token. With rewards on
the way, the greedy answer's reward-to-go at the same place is taken off: it depends on prompt and
place alone, and such a baseline leaves the gradient unbiased (Williams, 1992).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageEstimator, Advantages
from agent_r1.learner.algorithms.advantages.packing import gather, rewards_to_go, scatter


def greedy_baseline(
    greedy_rewards_P: npt.NDArray[np.floating], length: int, gamma: float
) -> npt.NDArray[np.float64]:
    """Return [length] the greedy answer's reward-to-go; past its end, that of its last token.

    Args:
        greedy_rewards_P: [P] rewards of the greedy answer's credited tokens, at least one.
        length: packed tokens of the trajectory that is compared with it.
        gamma: discount per packed token.
    """
    returns = rewards_to_go(np.asarray(greedy_rewards_P, np.float64), gamma)
    return returns[np.minimum(np.arange(length), len(returns) - 1)]


class Remax(AdvantageEstimator):
    """Gives every credited token G_t - G_t(greedy), t counting credited tokens.

    A trajectory with the rewards of the greedy answer has exactly 0. Where the only reward is the
    last token's and gamma is 1, this is R - R(greedy).
    """

    gamma: float = 1.0
    """Discount per packed token."""
    needs_greedy_baseline: ClassVar[bool] = True

    def __call__(self, batch: AdvantageBatch) -> Advantages:
        """Return the advantages of a batch."""
        assert batch.greedy_rewards is not None
        packed = gather(batch.token_rewards, batch.credit_masks)
        advantages = [
            rewards_to_go(rewards, self.gamma) - greedy_baseline(greedy, len(rewards), self.gamma)
            for rewards, greedy in zip(packed, batch.greedy_rewards, strict=True)
        ]
        return Advantages(scatter(advantages, batch.credit_masks))
