"""Truncated weights and the mask on the mean ratio: worked by hand."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learner.algorithms.importance import keeps_sequence, truncated_weights


def logs(*numbers: float) -> np.ndarray:
    """Log-probabilities of probabilities."""
    return np.log(np.array(numbers)).astype(np.float32)


def test_weights_are_ratios_up_to_the_cap():
    # ratios 0.5 / 0.25 = 2, 0.1 / 0.2 = 0.5, 0.9 / 0.1 = 9, which the cap of 3 cuts
    weights = truncated_weights(logs(0.5, 0.1, 0.9), logs(0.25, 0.2, 0.1), cap=3.0)
    np.testing.assert_allclose(weights, [2.0, 0.5, 3.0], rtol=1e-6)
    assert weights.dtype == np.float32


def test_an_extreme_difference_stays_finite():
    weights = truncated_weights(np.array([0.0, -1e4]), np.array([-1e4, 0.0]), cap=math.inf)
    np.testing.assert_allclose(weights, [math.exp(20), math.exp(-20)], rtol=1e-6)


@given(st.lists(st.floats(-30, 0), min_size=1, max_size=8), st.floats(1, 10))
def test_equal_policies_weigh_one_and_are_kept(logprobs: list[float], cap: float):
    array = np.array(logprobs)
    np.testing.assert_array_equal(truncated_weights(array, array, cap), 1.0)
    assert keeps_sequence(array, array, 1.0, 1.0)


def test_a_sequence_is_kept_by_its_geometric_mean():
    # ratios 2 and 1/8: geometric mean sqrt(1/4) = 0.5; the arithmetic one is 1.06
    learner, rollout = logs(0.5, 0.1), logs(0.25, 0.8)
    assert keeps_sequence(learner, rollout, 0.49, 1.0)
    assert not keeps_sequence(learner, rollout, 0.51, 1.0)
    # the other way round it is 2
    assert keeps_sequence(rollout, learner, 0.0, 2.01)
    assert not keeps_sequence(rollout, learner, 0.0, 1.99)
