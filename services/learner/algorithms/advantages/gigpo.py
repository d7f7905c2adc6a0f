"""GiGPO: trajectories against their group, and turns against those taken in the same state.

train_samples.py --rewards of one batch--> here --advantages--> a loss of losses/.

`ToolEnv.step` names states (`EnvStep.state_key`); all trajectories of a group begin in one. With
turn_coef = 0, or where no state is met twice and trajectories have one turn each, it is grpo.py.

Source: arXiv:2505.10978, section 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import partial
from typing import ClassVar

import numpy as np

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageEstimator, Advantages
from agent_r1.learner.algorithms.advantages.groups import compare_trajectories, trajectory_rewards
from agent_r1.learner.algorithms.advantages.grpo import group_relative_advantages
from agent_r1.learner.algorithms.advantages.packing import rewards_to_go
from agent_r1.learner.algorithms.advantages.turns import compare_turns, spread_turns, turn_rewards


class Gigpo(AdvantageEstimator):
    """Gives every credited token of a turn A_E + turn_coef * A_S.

    A_E compares the total rewards of a group's trajectories. A_S compares the turns that the group
    took in one state, by R_k = sum of gamma^(j-k) r_j over turns j >= k; it is 0 where the state
    was met once.
    """

    gamma: float = 1.0
    """Discount per turn."""
    normalize_std: bool = True
    """Divide by the sample std of what is compared."""
    turn_coef: float = 1.0
    """Weight of the advantage of turns beside that of trajectories."""
    compares_group: ClassVar[bool] = True
    credit: ClassVar = "turn"

    def __call__(self, batch: AdvantageBatch) -> Advantages:
        """Return the advantages of a batch, and the share of states met twice as a metric."""
        relative = partial(group_relative_advantages, normalize_std=self.normalize_std)
        episodes = compare_trajectories(relative, trajectory_rewards(batch), batch)
        returns = [
            rewards_to_go(np.array(rewards_K), self.gamma).tolist()
            for rewards_K in turn_rewards(batch)
        ]
        states = [_state(batch, i, k) for i, row in enumerate(returns) for k in range(len(row))]
        flat = [R for returns_K in returns for R in returns_K]
        in_state = iter(compare_turns(flat, states, normalize_std=self.normalize_std))
        advantages = [
            [episode + self.turn_coef * next(in_state) for _ in returns_K]
            for episode, returns_K in zip(episodes, returns, strict=True)
        ]
        return Advantages(spread_turns(advantages, batch), metrics=_shared_states(states))


def _state(batch: AdvantageBatch, i: int, k: int) -> tuple[Hashable, ...]:
    """Return what identifies the state in which trajectory i takes its turn k."""
    key = batch.state_keys[i][k]
    if k == 0 and _begins(batch, i):
        return (batch.group_ids[i], "start")
    return (batch.group_ids[i], "key", key) if key else (batch.group_ids[i], "unnamed", i, k)


def _begins(batch: AdvantageBatch, i: int) -> bool:
    """Return whether row i begins with the prompt that all trajectories of its group have."""
    return batch.lineages is None or batch.lineages[i].begins


def _shared_states(states: list[tuple[Hashable, ...]]) -> dict[str, float]:
    """Return the share of states, other than the first of each group, with two turns or more."""
    later = Counter(state for state in states if state[1] != "start")
    shared = sum(count > 1 for count in later.values())
    return {"advantage/shared_states": shared / len(later) if later else 0.0}
