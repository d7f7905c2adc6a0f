"""What an advantage batch refuses, and the steps that estimators share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageOptions
from agent_r1.learner.algorithms.advantages.packing import gather, rewards_to_go, scatter, whiten

MASK = np.array([False, True, False, True])
REWARDS = np.array([0.0, 0.5, 0.0, 1.0])


def make_batch(**changes: Any) -> AdvantageBatch:
    """Two trajectories of one group: prompt, sampled, tool, sampled."""
    fields: dict[str, Any] = {
        "group_ids": [7, 7],
        "token_rewards": [REWARDS, REWARDS],
        "credit_masks": [MASK, MASK],
        "values": [REWARDS, REWARDS],
        "greedy_rewards": [np.array([0.0]), np.array([1.0])],
        "turn_starts": [np.array([1, 3]), np.array([1])],
        "state_keys": [["", "found"], [""]],
    }
    return AdvantageBatch(**(fields | changes))


def test_a_batch_with_everything_and_one_with_only_rewards_are_taken():
    assert make_batch().values is not None
    assert make_batch(values=None, greedy_rewards=None).values is None


@pytest.mark.parametrize("field", ["group_ids", "token_rewards", "credit_masks", "values"])
def test_unequal_counts_are_an_error(field: str):
    with pytest.raises(ValueError, match="there must be one per trajectory"):
        make_batch(**{field: getattr(make_batch(), field)[:1]})
    with pytest.raises(ValueError, match="2 value arrays, 3 greedy reward arrays"):
        make_batch(greedy_rewards=[np.zeros(1)] * 3)
    with pytest.raises(ValueError, match="1 lists of turns, 2 lists of state keys"):
        make_batch(turn_starts=[np.array([1])])


def test_an_empty_batch_is_an_error():
    with pytest.raises(ValueError, match="0 trajectories; it needs at least 1"):
        AdvantageBatch([], [], [])


@pytest.mark.parametrize(("field", "name"), [("token_rewards", "rewards"), ("values", "values")])
def test_shapes_that_differ_are_an_error(field: str, name: str):
    with pytest.raises(ValueError, match=rf"trajectory 1 has {name} of shape \(3,\)"):
        make_batch(**{field: [REWARDS, REWARDS[1:]]})


@pytest.mark.parametrize("mask", [np.array([0, 1, 0, 1]), MASK[None]])
def test_a_mask_that_is_not_a_row_of_bools_is_an_error(mask: Any):
    with pytest.raises(ValueError, match="trajectory 0 has a credit mask of shape"):
        make_batch(credit_masks=[mask, MASK])


def test_a_trajectory_without_a_credited_token_is_an_error():
    with pytest.raises(ValueError, match=r"trajectory 1 has no token in its credit mask \(4 "):
        make_batch(token_rewards=[REWARDS, np.zeros(4)], credit_masks=[MASK, MASK & False])


def test_a_reward_outside_the_mask_is_an_error():
    with pytest.raises(ValueError, match=r"trajectory 1 has a reward \(0.25\) on token 2, which"):
        make_batch(token_rewards=[REWARDS, np.array([0.0, 0.0, 0.25, 0.0])])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_an_error_that_names_the_trajectory(number: float):
    broken = np.array([0.0, 0.0, 0.0, number])
    with pytest.raises(ValueError, match=f"trajectory 1 has a reward of {number} on token 3"):
        make_batch(token_rewards=[REWARDS, broken])
    with pytest.raises(ValueError, match=f"trajectory 1 has a value of {number} on token 3"):
        make_batch(values=[REWARDS, broken])
    with pytest.raises(ValueError, match=f"trajectory 1 has a greedy reward of {number}"):
        make_batch(greedy_rewards=[np.zeros(1), np.array([0.0, number])])


@pytest.mark.parametrize("starts", [[], [0, 3], [3], [1, 2], [1, 1], [1, 4]])
def test_turns_start_on_credited_tokens_from_the_first_on(starts: list[int]):
    with pytest.raises(ValueError, match=r"trajectory 1 has turns .* first credited token \(1\)"):
        make_batch(turn_starts=[np.array([1]), np.array(starts, np.int64)], state_keys=None)


def test_every_turn_has_a_state_key():
    with pytest.raises(ValueError, match="trajectory 1 has 2 state keys for 1 turns"):
        make_batch(state_keys=[["", "found"], ["", "found"]])


@pytest.mark.parametrize("greedy", [np.zeros(0), np.zeros((1, 2))])
def test_a_greedy_answer_without_a_token_is_an_error(greedy: np.ndarray):
    with pytest.raises(ValueError, match="trajectory 1 has greedy rewards of shape"):
        make_batch(greedy_rewards=[np.zeros(1), greedy])


def test_values_outside_the_mask_are_not_read():
    assert make_batch(values=[REWARDS, np.where(MASK, 0.0, np.nan)]).values is not None


@pytest.mark.parametrize("number", [-0.1, 1.1, math.nan])
def test_discounts_go_from_0_to_1(number: float):
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        AdvantageOptions(gamma=number)
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        AdvantageOptions(lam=number)


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
