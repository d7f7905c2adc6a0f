"""What holds for every estimator: tool text changes nothing, and neither does the order."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learner.algorithms import ADVANTAGES, make_advantage
from agent_r1.learner.algorithms.advantages import AdvantageBatch
from agent_r1.learner.algorithms.advantages.packing import gather, rewards_to_go, whiten

NUMBER = st.floats(-10, 10)
# A trajectory: group, greedy reward, and for each sampled token its reward and value.
TRAJECTORY = st.tuples(
    st.integers(0, 2), NUMBER, st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=6)
)
TRAJECTORIES = st.lists(TRAJECTORY, min_size=1, max_size=6)
OPTIONS = st.fixed_dictionaries(
    {
        "gamma": st.floats(0, 1),
        "lam": st.floats(0, 1),
        "normalize_std": st.booleans(),
        "turn_coef": st.floats(0, 2),
    }
)
every_estimator = pytest.mark.parametrize("name", sorted(ADVANTAGES))


def build_batch(trajectories, tool_tokens) -> AdvantageBatch:
    """Lay trajectories out with `tool_tokens()` tokens of other text around every sampled one.

    Every second sampled token begins a turn; every second turn is taken in the state "again".
    """
    masks, rewards, values = [], [], []
    for _, _, sampled in trajectories:
        rows: list[tuple[bool, float, float]] = []
        for reward, value in sampled:
            # Values on tool tokens are whatever the critic says there.
            rows += [(False, 0.0, 1e3)] * tool_tokens()
            rows.append((True, reward, value))
        rows += [(False, 0.0, -1e3)] * tool_tokens()
        mask, reward_row, value_row = (np.array(column) for column in zip(*rows, strict=True))
        masks.append(mask)
        rewards.append(reward_row)
        values.append(value_row)
    starts = [np.flatnonzero(mask)[::2] for mask in masks]
    return AdvantageBatch(
        turn_starts=starts,
        state_keys=[["again" if k % 2 else "" for k in range(len(row))] for row in starts],
        group_ids=[group for group, _, _ in trajectories],
        token_rewards=rewards,
        credit_masks=masks,
        values=values,
        greedy_rewards=[np.array([0.0, greedy]) for _, greedy, _ in trajectories],
    )


@every_estimator
@given(trajectories=TRAJECTORIES, options=OPTIONS, data=st.data())
def test_tool_tokens_change_no_advantage_and_have_none(name: str, trajectories, options, data):
    plain = build_batch(trajectories, lambda: 0)
    spaced = build_batch(trajectories, lambda: data.draw(st.integers(0, 4)))
    expected, expected_returns, *_ = make_advantage(name, options)(plain)
    found, found_returns, *_ = make_advantage(name, options)(spaced)
    for array, mask, unspaced in zip(found, spaced.credit_masks, expected, strict=True):
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array[mask], unspaced)
        np.testing.assert_array_equal(array[~mask], 0.0)
    assert (
        (found_returns is None) == (expected_returns is None) == (not ADVANTAGES[name].needs_critic)
    )
    for array, mask, unspaced in zip(
        found_returns or [], spaced.credit_masks, expected_returns or [], strict=False
    ):
        np.testing.assert_array_equal(array[mask], unspaced)
        np.testing.assert_array_equal(array[~mask], 0.0)


@every_estimator
@given(trajectories=TRAJECTORIES, options=OPTIONS, random=st.randoms())
def test_another_order_of_trajectories_only_reorders(name: str, trajectories, options, random):
    order = list(range(len(trajectories)))
    random.shuffle(order)
    direct = make_advantage(name, options)(build_batch(trajectories, lambda: 1)).advantages
    shuffled = [trajectories[i] for i in order]
    reordered = make_advantage(name, options)(build_batch(shuffled, lambda: 1)).advantages
    for i, array in zip(order, reordered, strict=True):
        np.testing.assert_array_equal(array, direct[i])


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@given(trajectories=TRAJECTORIES, options=OPTIONS)
def test_the_advantages_of_a_group_sum_to_zero(name: str, trajectories, options):
    batch = build_batch(trajectories, lambda: 1)
    advantages = make_advantage(name, options)(batch).advantages
    for group in set(batch.group_ids):
        members = [
            array[mask][0]
            for array, mask, g in zip(advantages, batch.credit_masks, batch.group_ids, strict=True)
            if g == group
        ]
        if len(members) > 1:
            assert sum(map(float, members)) == pytest.approx(0, abs=1e-4)


@given(TRAJECTORIES)
def test_reinforce_pp_without_discount_is_the_whitened_reward_to_go(trajectories):
    batch = build_batch(trajectories, lambda: 1)
    packed = gather(batch.token_rewards, batch.credit_masks)
    expected = whiten([rewards_to_go(rewards, 1.0) for rewards in packed])
    found = make_advantage("reinforce_pp", {})(batch).advantages
    for array, mask, whitened in zip(found, batch.credit_masks, expected, strict=True):
        np.testing.assert_allclose(array[mask], whitened, atol=1e-6)


@given(trajectories=TRAJECTORIES, options=OPTIONS)
def test_remax_of_the_greedy_answers_own_rewards_is_exactly_zero(trajectories, options):
    batch = build_batch(trajectories, lambda: 1)
    greedy = gather(batch.token_rewards, batch.credit_masks)
    same = dataclasses.replace(batch, greedy_rewards=greedy)
    for array in make_advantage("remax", options)(same).advantages:
        np.testing.assert_array_equal(array, 0.0)
