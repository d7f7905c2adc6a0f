"""MT-GRPO: the outcome against the group's, and each turn's reward against the same turn's there.

train_samples.py --rewards of one batch--> here --advantages--> a loss of losses/.

Without process rewards, or where trajectories have one turn, it is grpo.py.

Source: arXiv:2505.11821, version 1, section 4, which has two turns; with more, every turn before
the last is treated as its first.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import ClassVar

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageEstimator, Advantages
from agent_r1.learner.algorithms.advantages.groups import apply_by_group, compare_trajectories
from agent_r1.learner.algorithms.advantages.grpo import group_relative_advantages
from agent_r1.learner.algorithms.advantages.turns import compare_turns, spread_turns, turn_rewards


class MtGrpo(AdvantageEstimator):
    """Gives the last turn A_O, and turn k before it A_O + turn_coef * A_T(k).

    A_O compares the rewards of the last turns within a group (the outcome lies there), A_T(k) the
    rewards of turn k among the group's trajectories that have another turn after it; it is 0 where
    there is only one.
    """

    normalize_std: bool = True
    """Divide by the sample std of what is compared."""
    turn_coef: float = 1.0
    """Weight of the advantage of turns beside that of trajectories."""
    compares_group: ClassVar[bool] = True
    credit: ClassVar = "turn"

    def __call__(self, batch: AdvantageBatch) -> Advantages:
        """Return the advantages of a batch."""
        rewards = turn_rewards(batch)
        names = [""] * len(rewards) if batch.lineages is None else [r.name for r in batch.lineages]
        outcomes = self._outcomes([row[-1] for row in rewards], names, batch)
        advantages = [[outcome] * len(row) for outcome, row in zip(outcomes, rewards, strict=True)]
        before_last = [(i, k) for i, row in enumerate(rewards) for k in range(len(row) - 1)]
        by_turn = compare_turns(
            [rewards[i][k] for i, k in before_last],
            [(batch.group_ids[i], names[i], k) for i, k in before_last],
            normalize_std=self.normalize_std,
        )
        for (i, k), advantage in zip(before_last, by_turn, strict=True):
            advantages[i][k] += self.turn_coef * advantage
        return Advantages(spread_turns(advantages, batch))

    def _outcomes(
        self, last_rewards: list[float], names: list[str], batch: AdvantageBatch
    ) -> list[float]:
        """Return [N] A_O: against lineages of the same name, else against trajectories."""
        relative = partial(group_relative_advantages, normalize_std=self.normalize_std)
        kinds = list(zip(batch.group_ids, names, strict=True))
        named = apply_by_group(relative, last_rewards, kinds)
        alone = compare_trajectories(relative, last_rewards, batch)
        met = Counter(kinds)
        return [
            mine if met[kind] > 1 else other
            for mine, other, kind in zip(named, alone, kinds, strict=True)
        ]
