"""Generalized advantages: worked by hand, and its two ends as properties."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learner.algorithms.advantages import AdvantageBatch
from agent_r1.learner.algorithms.advantages.gae import Gae, generalized_advantages
from agent_r1.learner.algorithms.advantages.packing import rewards_to_go

NUMBERS = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=12)


def test_two_trajectories_by_hand():
    # gamma 0.9, lambda 0.5, sampled tokens of the first: rewards 0.5, 1 and values 0.2, 0.6
    #   last:  delta = 1 - 0.6 = 0.4                    A = 0.4
    #   first: delta = 0.5 + 0.9 * 0.6 - 0.2 = 0.84     A = 0.84 + 0.45 * 0.4 = 1.02
    # second: delta = 0 - 0.3 = -0.3. Returns A + V: 1.22, 1.0 and 0.
    # whitened: mean 1.12 / 3, deviations 0.64667, 0.02667, -0.67333, variance 0.87227 / 2,
    # so divided by 0.66040
    mask = np.array([False, True, False, True])
    batch = AdvantageBatch(
        group_ids=[1, 2],
        token_rewards=[np.array([0.0, 0.5, 0.0, 1.0]), np.array([0.0])],
        credit_masks=[mask, np.array([True])],
        values=[np.array([9.0, 0.2, 9.0, 0.6]), np.array([0.3])],
    )
    advantages, returns, *_ = Gae(gamma=0.9, lam=0.5)(batch)
    np.testing.assert_allclose(advantages[0], [0, 0.97920, 0, 0.04038], atol=1e-5)
    np.testing.assert_allclose(advantages[1], [-1.01958], atol=1e-5)
    assert returns is not None
    np.testing.assert_allclose(returns[0], [0, 1.22, 0, 1.0], atol=1e-6)
    np.testing.assert_allclose(returns[1], [0], atol=1e-6)


@given(NUMBERS, st.floats(0, 1))
def test_with_lambda_1_it_is_the_reward_to_go_minus_the_value(numbers, gamma: float):
    rewards, values = np.array(numbers).T
    expected = rewards_to_go(rewards, gamma)
    no_critic = generalized_advantages(rewards, np.zeros_like(values), gamma, 1.0)
    np.testing.assert_allclose(no_critic, expected, atol=1e-9)
    np.testing.assert_allclose(
        generalized_advantages(rewards, values, gamma, 1.0), expected - values, atol=1e-9
    )


@given(NUMBERS, st.floats(0, 1))
def test_with_lambda_0_it_is_the_one_step_error(numbers, gamma: float):
    rewards, values = np.array(numbers).T
    following = np.append(values[1:], 0.0)
    found = generalized_advantages(rewards, values, gamma, 0.0)
    np.testing.assert_allclose(found, rewards + gamma * following - values, atol=1e-9)
