"""The control experiment: rewards handed out in random order within their group."""

from __future__ import annotations

import pytest

from agent_r1.learner.config import LearnerTable
from agent_r1.learner.groups import Group, Slot
from agent_r1.learner.samples import build_samples, outcome_rewards
from agent_r1_proto.rewards import ScoredTrajectory
from tests.builders import rollout_task, scored


def group(group_id: int, *rewards: float) -> Group:
    members: list[ScoredTrajectory] = [
        scored(rollout_task(group_id=group_id, sample_index=index), total=reward)
        for index, reward in enumerate(rewards)
    ]
    slots = [Slot(issued_at=0.0, result=member) for member in members]
    return Group(group_id, members[0].trajectory.rollout.task, 0.0, slots)


REWARDS = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_rewards_stay_with_their_trajectories():
    assert outcome_rewards(group(0, *REWARDS), shuffle=False) == REWARDS


def test_shuffled_rewards_are_the_same_rewards_in_an_order_of_the_group():
    shuffled = [outcome_rewards(group(number, *REWARDS), shuffle=True) for number in (0, 0, 1)]
    assert [sorted(rewards) for rewards in shuffled] == [REWARDS] * 3
    assert shuffled[0] == shuffled[1]  # a resumed run hands out the same
    assert shuffled[0] != shuffled[2]
    assert shuffled[0] != REWARDS


def test_shuffled_advantages_follow_the_shuffled_rewards():
    table = LearnerTable(group_size=8, groups_per_batch=1, normalize_std=False)
    control = table.model_copy(update={"shuffle_rewards": True})
    _, means = build_samples([group(0, *REWARDS)], control)
    # mean of 0..7 is 3.5
    expected = [reward - 3.5 for reward in outcome_rewards(group(0, *REWARDS), shuffle=True)]
    assert means == pytest.approx(expected)
