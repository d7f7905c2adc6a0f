"""REINFORCE++-baseline: rewards centered within each group, then whitened over the batch.

Unlike GRPO's, its scale is the batch's, so that a group of nearly equal rewards stays small.

Source: REINFORCE++, arXiv:2501.03262.
"""

from __future__ import annotations

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageOptions, Advantages
from agent_r1.learner.algorithms.advantages.groups import apply_by_group, center
from agent_r1.learner.algorithms.advantages.packing import scatter, spread, total_rewards, whiten


def reinforce_pp_baseline_advantages(
    batch: AdvantageBatch, options: AdvantageOptions
) -> Advantages:
    """Whiten R - mean of the group, over all credited tokens; long trajectories weigh more."""
    del options  # the formula has no settings
    totals = total_rewards(batch.token_rewards, batch.credit_masks)
    scalars = apply_by_group(center, totals, batch.group_ids)
    return Advantages(scatter(whiten(spread(scalars, batch.credit_masks)), batch.credit_masks))
