"""GiGPO: trajectories against their group, and turns against those taken in the same state.

train_samples.py --rewards of one batch--> here --advantages--> a loss of losses/.

`ToolEnv.step` names states (`EnvStep.state_key`); all trajectories of a group begin in one. With
turn_coef = 0, or where no state is met twice and trajectories have one turn each, it is grpo.py.

Source: arXiv:2505.10978, section 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import numpy as np

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageOptions, Advantages
from agent_r1.learner.algorithms.advantages.groups import (
    compare_trajectories,
    trajectory_rewards,
)
from agent_r1.learner.algorithms.advantages.grpo import group_relative_advantages
from agent_r1.learner.algorithms.advantages.packing import rewards_to_go
from agent_r1.learner.algorithms.advantages.turns import (
    compare_turns,
    spread_turns,
    turn_rewards,
    turns_of,
)


def gigpo_advantages(batch: AdvantageBatch, options: AdvantageOptions) -> Advantages:
    """Return A_E + turn_coef * A_S on every credited token of a turn.

    A_E compares the total rewards of a group's trajectories. A_S compares the turns that the group
    took in one state, by R_k = sum of gamma^(j-k) r_j over turns j >= k; it is 0 where the state
    was met once.

    Raises:
        ValueError: the batch has no turns, or no state keys.
    """
    starts = turns_of(batch, "gigpo")
    if batch.state_keys is None:
        raise ValueError(
            'advantage = "gigpo" compares turns taken in the same state and the batch has no '
            "state_keys; give one per turn"
        )

    def relative(rewards_G: list[float]) -> list[float]:
        return group_relative_advantages(rewards_G, normalize_std=options.normalize_std)

    episodes = compare_trajectories(relative, trajectory_rewards(batch), batch)
    returns = [
        rewards_to_go(np.array(rewards_K), options.gamma).tolist()
        for rewards_K in turn_rewards(batch, starts)
    ]
    states = [
        _state(batch, i, k) for i, returns_K in enumerate(returns) for k in range(len(returns_K))
    ]
    in_state = iter(compare_turns([R for row in returns for R in row], states, options))
    advantages = [
        [episode + options.turn_coef * next(in_state) for _ in returns_K]
        for episode, returns_K in zip(episodes, returns, strict=True)
    ]
    return Advantages(
        spread_turns(advantages, starts, batch.credit_masks), metrics=_shared_states(states)
    )


def _state(batch: AdvantageBatch, i: int, k: int) -> tuple[Hashable, ...]:
    """Return what identifies the state in which trajectory i takes its turn k."""
    assert batch.state_keys is not None
    key = batch.state_keys[i][k]
    if k == 0 and _begins(batch, i):
        return (batch.group_ids[i], "start")
    return (batch.group_ids[i], "key", key) if key else (batch.group_ids[i], "unnamed", i, k)


def _begins(batch: AdvantageBatch, i: int) -> bool:
    """Whether row i begins with the prompt that all trajectories of its group have."""
    return batch.lineages is None or batch.lineages[i].begins


def _shared_states(states: list[tuple[Hashable, ...]]) -> dict[str, float]:
    """Return the share of states, other than the first of each group, with two turns or more."""
    later = Counter(state for state in states if state[1] != "start")
    shared = sum(count > 1 for count in later.values())
    return {"advantage/shared_states": shared / len(later) if later else 0.0}
