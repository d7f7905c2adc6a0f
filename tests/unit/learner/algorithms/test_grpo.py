"""Group-relative advantages: worked by hand, and as properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learner.algorithms.advantages import AdvantageBatch
from agent_r1.learner.algorithms.advantages.grpo import Grpo, group_relative_advantages

REWARDS = st.lists(st.floats(-10, 10, allow_nan=False), min_size=2, max_size=16)
DR_GRPO = Grpo(normalize_std=False)


def test_two_of_four_correct_is_symmetric():
    # mean 0.5, sample std sqrt(1/3) = 0.57735, by hand: 0.5 / 0.57735 = 0.86603
    assert group_relative_advantages([1, 0, 0, 1]) == pytest.approx(
        [0.86603, -0.86603, -0.86603, 0.86603], abs=1e-4
    )


def test_one_of_three_correct():
    # mean 1/3, deviations 2/3, -1/3, -1/3; sample variance (4/9 + 1/9 + 1/9) / 2 = 1/3
    expected = [2 / 3 / math.sqrt(1 / 3), -1 / 3 / math.sqrt(1 / 3), -1 / 3 / math.sqrt(1 / 3)]
    assert group_relative_advantages([1, 0, 0]) == pytest.approx(expected, abs=1e-5)


def test_eps_is_added_to_the_std():
    # mean 0, sample std sqrt((1 + 1) / 1) = sqrt 2; 1 / (sqrt 2 + 0.5)
    expected = 1 / (math.sqrt(2) + 0.5)
    assert group_relative_advantages([1, -1], eps=0.5) == pytest.approx([expected, -expected])


def test_without_std_rewards_are_only_centered():
    assert group_relative_advantages([3, 1, 2], normalize_std=False) == pytest.approx([1, -1, 0])


def test_equal_rewards_give_exactly_zero():
    # the mean of three 0.1 is not 0.1 in floating point
    assert group_relative_advantages([0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]


def test_a_group_of_one_has_mean_0_and_std_1():
    # (5 - 0) / (1 + 1e-6)
    assert group_relative_advantages([5.0]) == pytest.approx([4.999995], abs=1e-9)
    assert group_relative_advantages([5.0], normalize_std=False) == [5.0]


@given(REWARDS)
def test_advantages_sum_to_zero(rewards: list[float]):
    assert sum(group_relative_advantages(rewards)) == pytest.approx(0, abs=1e-6 * len(rewards) * 10)


@given(REWARDS, st.randoms())
def test_the_order_within_a_group_does_not_matter(rewards: list[float], random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    direct = group_relative_advantages(rewards)
    shuffled = group_relative_advantages([rewards[i] for i in order])
    assert shuffled == [direct[i] for i in order]


def make_batch(groups: list[int], totals: list[list[float]]) -> AdvantageBatch:
    """Trajectories of four tokens: prompt, sampled, tool, sampled; rewards on the sampled two."""
    mask = np.array([False, True, False, True])
    rewards = [np.array([0.0, first, 0.0, last]) for first, last in totals]
    return AdvantageBatch(groups, rewards, [mask] * len(groups))


def test_every_credited_token_gets_the_advantage_and_other_tokens_exactly_zero():
    # group 7: rewards 1 and 0, mean 0.5, sample std sqrt(0.5) = 0.70711; 0.5 / 0.70711 = 0.70711
    batch = make_batch([7, 7], [[0.0, 1.0], [0.0, 0.0]])
    advantages, returns, *_ = Grpo()(batch)
    np.testing.assert_allclose(advantages[0], [0, 0.70711, 0, 0.70711], atol=1e-4)
    np.testing.assert_allclose(advantages[1], [0, -0.70711, 0, -0.70711], atol=1e-4)
    assert advantages[0][0] == advantages[0][2] == 0.0
    assert returns is None


def test_groups_do_not_mix_and_may_be_interleaved():
    batch = make_batch([1, 2, 1, 2], [[0, 1], [0, 5], [0, 0], [0, 5]])
    advantages = DR_GRPO(batch).advantages
    assert [float(a[1]) for a in advantages] == [0.5, 0.0, -0.5, 0.0]


def test_process_rewards_count_in_the_total():
    # totals 0.5 + 1 = 1.5 and 0.5; mean 1
    batch = make_batch([1, 1], [[0.5, 1.0], [0.5, 0.0]])
    advantages = DR_GRPO(batch).advantages
    assert [float(a[3]) for a in advantages] == [0.5, -0.5]
