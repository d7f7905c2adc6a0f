"""The steps that estimators share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learner.algorithms.advantages.packing import gather, rewards_to_go, scatter, whiten

MASK = np.array([False, True, False, True])
REWARDS = np.array([0.0, 0.5, 0.0, 1.0])


def test_scatter_undoes_gather():
    packed = gather([REWARDS], [MASK])
    np.testing.assert_array_equal(packed[0], [0.5, 1.0])
    back = scatter(packed, [MASK])
    np.testing.assert_array_equal(back[0], REWARDS)
    assert back[0].dtype == np.float32


def test_rewards_to_go_by_hand():
    # from the end: 1; 0 + 0.5 * 1 = 0.5; 2 + 0.5 * 0.5 = 2.25
    np.testing.assert_allclose(rewards_to_go(np.array([2.0, 0.0, 1.0]), 0.5), [2.25, 0.5, 1.0])


def test_whitening_by_hand():
    # mean 1, squared deviations 1 + 0 + 1 over n - 1 = 2: variance 1
    whitened = whiten([np.array([0.0, 1.0]), np.array([2.0])])
    np.testing.assert_allclose(np.concatenate(whitened), [-1.0, 0.0, 1.0], atol=1e-7)


def test_whitening_adds_1e_8_to_the_variance():
    # mean 0, variance 2e-8 / 1; 1e-4 / sqrt(3e-8) = 0.57735
    whitened = whiten([np.array([1e-4, -1e-4])])
    np.testing.assert_allclose(whitened[0], [0.57735, -0.57735], atol=1e-5)


@pytest.mark.parametrize("tokens", [[5.0], [0.1, 0.1, 0.1]])
def test_one_token_and_equal_tokens_are_whitened_to_exactly_zero(tokens: list[float]):
    np.testing.assert_array_equal(whiten([np.array(tokens)])[0], 0.0)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30), st.integers(1, 29))
def test_whitened_tokens_have_mean_0_and_variance_at_most_1(tokens: list[float], cut: int):
    array = np.array(tokens)
    whitened = np.concatenate(whiten([array[:cut], array[cut:]]))
    assert abs(whitened.mean()) < 1e-6
    assert whitened.var(ddof=1) < 1 + 1e-6
