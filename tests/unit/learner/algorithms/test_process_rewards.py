"""Normalization of process rewards: worked by hand, and its bound as a property."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learner.algorithms.process_rewards import normalize_process_rewards

# reverse cumulative sums 1, 0.5, 0.5 (peak 1) and -3, -1 (peak 3)
REWARDS = [np.array([0.5, 0.0, 0.5]), np.array([-2.0, -1.0])]


def test_a_batch_is_divided_by_its_largest_return():
    first, second = normalize_process_rewards(REWARDS, "batch")
    np.testing.assert_allclose(first, [1 / 6, 0, 1 / 6])
    np.testing.assert_allclose(second, [-2 / 3, -1 / 3])


def test_trajectories_are_divided_by_their_own():
    first, second = normalize_process_rewards(REWARDS, "trajectory")
    np.testing.assert_allclose(first, [0.5, 0, 0.5])
    np.testing.assert_allclose(second, [-2 / 3, -1 / 3])


def test_rewards_that_cancel_count_where_they_do_not():
    # reverse cumulative sums 1 and 2
    (found,) = normalize_process_rewards([np.array([-1.0, 2.0])], "batch")
    np.testing.assert_allclose(found, [-0.5, 1.0])


def test_none_copies():
    found = normalize_process_rewards(REWARDS, "none")
    np.testing.assert_array_equal(found[0], REWARDS[0])
    found[0][0] = 7.0
    assert REWARDS[0][0] == 0.5


@pytest.mark.parametrize("scope", ["none", "batch", "trajectory"])
def test_all_zero_stays_zero(scope: Any):
    found = normalize_process_rewards([np.zeros(3), np.zeros(0)], scope)
    np.testing.assert_array_equal(found[0], 0.0)
    assert found[1].shape == (0,)
    assert normalize_process_rewards([], scope) == []


@given(st.lists(st.lists(st.floats(-100, 100), max_size=8), min_size=1, max_size=5))
def test_no_return_exceeds_1(rewards: list[list[float]]):
    found = normalize_process_rewards([np.array(row) for row in rewards], "batch")
    for row in found:
        returns = np.cumsum(row[::-1])
        assert np.all(np.abs(returns) <= 1 + 1e-9)
