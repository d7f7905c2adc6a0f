"""Leave-one-out advantages: worked by hand, and against the plain form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learner.algorithms.advantages import AdvantageBatch
from agent_r1.learner.algorithms.advantages.rloo import Rloo, leave_one_out_advantages


def test_three_rewards_by_hand():
    # the others' means are 0.25, 0.75 and 0.5
    assert leave_one_out_advantages([1.0, 0.0, 0.5]) == pytest.approx([0.75, -0.75, 0.0])


def test_a_group_of_one_keeps_its_reward():
    assert leave_one_out_advantages([2.0]) == [2.0]


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_it_is_the_reward_minus_the_mean_of_the_others(rewards: list[float]):
    total = sum(rewards)
    expected = [r - (total - r) / (len(rewards) - 1) for r in rewards]
    assert leave_one_out_advantages(rewards) == pytest.approx(expected, abs=1e-9)


def test_groups_of_a_batch_by_hand():
    # group 1: totals 1.5 and 0.5: 1.5 - 0.5 = 1 and -1; group 2 alone: its reward
    mask = np.array([True, False, True])
    rewards = [np.array([0.5, 0, 1.0]), np.array([0, 0, 3.0]), np.array([0.5, 0, 0])]
    batch = AdvantageBatch([1, 2, 1], rewards, [mask] * 3)
    advantages = Rloo()(batch).advantages
    np.testing.assert_allclose(advantages, [[1, 0, 1], [3, 0, 3], [-1, 0, -1]])
