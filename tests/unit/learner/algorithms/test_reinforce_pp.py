"""REINFORCE++ and its baseline variant, and ReMax: worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from agent_r1.learner.algorithms.advantages import AdvantageBatch
from agent_r1.learner.algorithms.advantages.reinforce_pp import ReinforcePP
from agent_r1.learner.algorithms.advantages.reinforce_pp_baseline import ReinforcePPBaseline
from agent_r1.learner.algorithms.advantages.remax import Remax


def test_discounted_rewards_to_go_are_whitened_over_the_batch():
    # gamma 0.5 over sampled tokens alone: G = 0.5, 1 and, in the second trajectory, 0; mean 0.5,
    # variance (0 + 0.25 + 0.25) / 2 = 0.25, so 0, 1 and -1
    rewards = [np.array([0.0, 0.0, 0.0, 1.0]), np.array([0.0])]
    masks = [np.array([False, True, False, True]), np.array([True])]
    advantages, returns, *_ = ReinforcePP(gamma=0.5)(AdvantageBatch([1, 2], rewards, masks))
    np.testing.assert_allclose(advantages[0], [0, 0, 0, 1], atol=1e-6)
    np.testing.assert_allclose(advantages[1], [-1], atol=1e-6)
    assert returns is None


def test_a_process_reward_counts_for_the_tokens_up_to_it_only():
    # G = 1.5, 0.5, 0.5; mean 5/6, deviations 2/3, -1/3, -1/3, variance (4 + 1 + 1) / 9 / 2 = 1/3
    batch = AdvantageBatch([1], [np.array([1.0, 0.0, 0.5])], [np.ones(3, dtype=bool)])
    advantages = ReinforcePP()(batch).advantages
    np.testing.assert_allclose(advantages[0], [1.1547, -0.57735, -0.57735], atol=1e-5)


def test_centered_rewards_are_whitened_over_tokens():
    # centered 0.5 on one token and -0.5 on three; mean -0.25, variance
    # (0.75^2 + 3 * 0.25^2) / 3 = 0.25, so 0.75 / 0.5 and -0.25 / 0.5
    rewards = [np.array([0.0, 1.0]), np.array([0.0, 0.0, 0.0, 0.0])]
    masks = [np.array([False, True]), np.array([True, True, False, True])]
    batch = AdvantageBatch([1, 1], rewards, masks)
    advantages = ReinforcePPBaseline()(batch).advantages
    np.testing.assert_allclose(advantages[0], [0, 1.5], atol=1e-6)
    np.testing.assert_allclose(advantages[1], [-0.5, -0.5, 0, -0.5], atol=1e-6)


def test_groups_of_equal_rewards_have_no_advantage():
    rewards = [np.array([0.1])] * 3 + [np.array([0.7])] * 3
    batch = AdvantageBatch([1, 1, 1, 2, 2, 2], rewards, [np.array([True])] * 6)
    advantages = ReinforcePPBaseline()(batch).advantages
    np.testing.assert_array_equal(advantages, 0.0)


MASK = np.array([True, False, True])


def remax(greedy_rewards: list[float], gamma: float = 1.0) -> list[float]:
    """Advantages of two sampled tokens: sampled (reward 0.5), tool, sampled (reward 1)."""
    greedy = [np.array(greedy_rewards)]
    batch = AdvantageBatch([1], [np.array([0.5, 0.0, 1.0])], [MASK], greedy_rewards=greedy)
    return Remax(gamma=gamma)(batch).advantages[0][MASK].tolist()


def test_remax_takes_the_greedy_reward_to_go_off_the_own():
    # G = 1.5 and 1. A greedy answer of one token, reward 0.75: 0.75 on both.
    assert remax([0.75]) == [0.75, 0.25]
    # Greedy rewards 0, 0.5: G = 0.5 and 0.5.
    assert remax([0.0, 0.5]) == [1.0, 0.5]
    # gamma 0.5: own G = 0.5 + 0.5 = 1 and 1; greedy 0, 0, 1: G = 0.25, 0.5, 1.
    assert remax([0.0, 0.0, 1.0], gamma=0.5) == [0.75, 0.5]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9, 1.0])
def test_a_trajectory_with_the_greedy_answers_rewards_has_exactly_no_remax_advantage(gamma: float):
    assert remax([0.5, 1.0], gamma) == [0.0, 0.0]
