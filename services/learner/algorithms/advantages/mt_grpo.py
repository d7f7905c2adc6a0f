"""MT-GRPO: the outcome against the group's, and each turn's reward against the same turn's there.

train_samples.py --rewards of one batch--> here --advantages--> a loss of losses/.

Without process rewards, or where trajectories have one turn, it is grpo.py.

Source: arXiv:2505.11821, version 1, section 4, which has two turns; with more, every turn before
the last is treated as its first.
"""

from __future__ import annotations

from collections import Counter

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageOptions, Advantages
from agent_r1.learner.algorithms.advantages.groups import (
    apply_by_group,
    compare_trajectories,
)
from agent_r1.learner.algorithms.advantages.grpo import group_relative_advantages
from agent_r1.learner.algorithms.advantages.turns import (
    compare_turns,
    spread_turns,
    turn_rewards,
    turns_of,
)


def mt_grpo_advantages(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    """Return A_O on the last turn, and A_O + turn_coef * A_T(k) on turn k before it.

    A_O compares the rewards of the last turns within a group (the outcome lies there), A_T(k) the
    rewards of turn k among the group's trajectories that have another turn after it; it is 0 where
    there is only one.

    Raises:
        ValueError: the batch has no turns.
    """
    starts = turns_of(batch, "mt_grpo")
    rewards = turn_rewards(batch, starts)

    def relative(rewards_G: list[float]) -> list[float]:
        return group_relative_advantages(rewards_G, normalize_std=options.normalize_std)

    names = [""] * len(rewards) if batch.lineages is None else [r.name for r in batch.lineages]
    kinds = list(zip(batch.group_ids, names, strict=True))
    outcomes = apply_by_group(relative, [row[-1] for row in rewards], kinds)
    alone = compare_trajectories(relative, [row[-1] for row in rewards], batch)
    met = Counter(kinds)
    outcomes = [
        mine if met[kind] > 1 else other
        for mine, other, kind in zip(outcomes, alone, kinds, strict=True)
    ]
    advantages = [[outcome] * len(row) for outcome, row in zip(outcomes, rewards, strict=True)]
    before_last = [(i, k) for i, rewards_K in enumerate(rewards) for k in range(len(rewards_K) - 1)]
    by_turn = compare_turns(
        [rewards[i][k] for i, k in before_last],
        [(batch.group_ids[i], names[i], k) for i, k in before_last],
        options,
    )
    for (i, k), advantage in zip(before_last, by_turn, strict=True):
        advantages[i][k] += options.turn_coef * advantage
    return Advantages(spread_turns(advantages, starts, batch.credit_masks))
