"""Credit by turn: turn-level GAE, MT-GRPO and GiGPO by hand, and as what they reduce to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learner.algorithms import make_advantage
from agent_r1.learner.algorithms.advantages import AdvantageBatch

RAW: Mapping[str, float] = {"normalize_std": False}
NUMBER = st.integers(-8, 8).map(lambda eighths: eighths / 8)


def batch(
    rewards: Sequence[Sequence[float]],
    *,
    groups: Sequence[int] | None = None,
    values: Sequence[Sequence[float]] | None = None,
    keys: Sequence[Sequence[str]] | None = None,
) -> AdvantageBatch:
    """Trajectories of two prompt tokens, and for each turn three sampled tokens and one of a tool.

    The reward of a turn lies on its last sampled token, the critic's value on its first.
    """

    def lay(numbers: Sequence[float], offset: int) -> np.ndarray:
        row = np.zeros(2 + 4 * len(numbers))
        row[2 + offset :: 4] = numbers
        return row

    masks = [
        np.array([False] * 2 + [True, True, True, False] * len(turns), np.bool_)
        for turns in rewards
    ]
    starts = [2 + 4 * np.arange(len(turns)) for turns in rewards]
    return AdvantageBatch(
        group_ids=groups or [0] * len(rewards),
        token_rewards=[lay(turns, 2) for turns in rewards],
        credit_masks=masks,
        values=None if values is None else [lay(turns, 0) for turns in values],
        turn_starts=starts,
        state_keys=keys or [[""] * len(turns) for turns in rewards],
    )


def by_turn(
    name: str, made: AdvantageBatch, options: Mapping[str, float] = RAW
) -> list[list[float]]:
    """Return [N][K] the advantages, which all sampled tokens of a turn have in common."""
    found = make_advantage(name, options)(made).advantages
    assert made.turn_starts is not None
    for array, starts in zip(found, made.turn_starts, strict=True):
        for start in starts:
            assert len({*array[start : start + 3].tolist()}) == 1
    return [array[starts].tolist() for array, starts in zip(found, made.turn_starts, strict=True)]


# -- turn-level GAE ------------------------------------------------------------------------------


def test_turn_gae_by_hand():
    made = batch([[0.5, 1.0], [0.0]], values=[[0.25, 0.5], [0.5]])
    options = {"gamma": 0.5, "lam": 0.5}
    # Second turn: 1 - 0.5 = 0.5. First: 0.5 + 0.5*0.5 - 0.25 + 0.25*0.5 = 0.625. Other: 0 - 0.5.
    # Whitened over the three turns: mean 0.625/3, deviations .41667, .29167, -.70833,
    # variance (.17361 + .08507 + .50174) / 2 = .38021, root .61661.
    expected = [[0.67574, 0.47301], [-1.14875]]
    found = by_turn("turn_gae", made, options)
    assert found[0] == pytest.approx(expected[0], abs=1e-4)
    assert found[1] == pytest.approx(expected[1], abs=1e-4)


def test_its_critic_learns_before_each_turn_and_nowhere_else():
    made = batch([[0.5, 1.0]], values=[[0.25, 0.5]])
    result = make_advantage("turn_gae", {"gamma": 0.5, "lam": 1.0})(made)
    assert result.returns is not None
    assert result.value_masks is not None
    # Reward-to-go: 1 at the second turn, 0.5 + 0.5 * 1 at the first.
    assert result.returns[0].tolist() == [0, 0, 1.0, 0, 0, 0, 1.0, 0, 0, 0]
    assert np.flatnonzero(result.value_masks[0]).tolist() == [2, 6]


@given(
    st.lists(st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=4), min_size=1, max_size=4),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_it_is_gae_of_trajectories_with_one_token_a_turn(trajectories, gamma, lam):
    options = {"gamma": gamma, "lam": lam}
    rewards = [[reward for reward, _ in turns] for turns in trajectories]
    values = [[value for _, value in turns] for turns in trajectories]
    tokens = AdvantageBatch(
        group_ids=[0] * len(rewards),
        token_rewards=[np.array(row) for row in rewards],
        credit_masks=[np.ones(len(row), np.bool_) for row in rewards],
        values=[np.array(row) for row in values],
    )
    expected = make_advantage("gae", options)(tokens).advantages
    found = by_turn("turn_gae", batch(rewards, values=values), options)
    for row, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(row, reference, atol=1e-5)


# -- MT-GRPO -------------------------------------------------------------------------------------


def test_mt_grpo_by_hand():
    made = batch([[0.5, 1.0], [0.0, 0.0], [0.25, 1.0, 0.0]])
    # Outcomes 1, 0, 0: mean 1/3. First turns .5, 0, .25: mean .25. The second turn of the last
    # trajectory has none to compare with: only the outcome.
    found = by_turn("mt_grpo", made)
    assert found[0] == pytest.approx([2 / 3 + 0.25, 2 / 3])
    assert found[1] == pytest.approx([-1 / 3 - 0.25, -1 / 3])
    assert found[2] == pytest.approx([-1 / 3, -1 / 3, -1 / 3])


def test_mt_grpo_scales_by_the_spread_of_what_it_compares_and_weighs_turns():
    made = batch([[0.5, 1.0], [0.0, 0.0]])
    # Two numbers are 1 / sqrt 2 sample deviations from their mean, whatever they are.
    found = by_turn("mt_grpo", made, {"turn_coef": 0.5})
    assert found[0] == pytest.approx([1.5 * 0.70711, 0.70711], abs=1e-4)
    assert found[1] == pytest.approx([-1.5 * 0.70711, -0.70711], abs=1e-4)


def test_mt_grpo_compares_within_a_group():
    made = batch([[1.0, 0.0], [0.0, 0.0], [9.0, 5.0], [9.0, 5.0]], groups=[0, 0, 1, 1])
    found = by_turn("mt_grpo", made)
    assert found == [[0.5, 0.0], [-0.5, 0.0], [0.0, 0.0], [0.0, 0.0]]


# -- GiGPO ---------------------------------------------------------------------------------------


def test_gigpo_by_hand():
    made = batch(
        [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0, 1.0]],
        keys=[["", "found"], ["", "found"], ["", "lost", "found"]],
    )
    options = {"gamma": 0.5, "normalize_std": False, "turn_coef": 2.0}
    # Totals 1, 0, 1: mean 2/3. Returns by turn: [.5, 1], [0, 0], [.25, .5, 1]. In the first state
    # .5, 0, .25: mean .25. In "found" 1, 0, 1: mean 2/3. "lost" was met once: nothing.
    found = by_turn("gigpo", made, options)
    assert found[0] == pytest.approx([1 / 3 + 2 * 0.25, 1 / 3 + 2 / 3])
    assert found[1] == pytest.approx([-2 / 3 - 2 * 0.25, -2 / 3 - 4 / 3])
    assert found[2] == pytest.approx([1 / 3, 1 / 3, 1 / 3 + 2 / 3])


def test_gigpo_reports_the_share_of_states_met_twice():
    keys = [["", "found", "found"], ["", "lost", ""]]
    made = batch([[0.0] * 3, [1.0] * 3], keys=keys)
    # "found" twice; "lost" and the unnamed one once; the first state is not counted.
    metrics = make_advantage("gigpo", RAW)(made).metrics
    assert metrics == {"advantage/shared_states": pytest.approx(1 / 3)}


def test_states_of_different_groups_are_different():
    made = batch([[0.0, 1.0], [0.0, 0.0]], groups=[0, 1], keys=[["", "found"]] * 2)
    assert make_advantage("gigpo", RAW)(made).metrics == {"advantage/shared_states": 0.0}


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.lists(st.tuples(NUMBER, st.sampled_from("ab")), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=6,
    ),
    st.floats(0, 1),
)
def test_gigpo_is_its_definition(trajectories, gamma):
    """Written down turn by turn, without the helpers."""
    rewards = [[reward for reward, _ in turns] for _, turns in trajectories]
    groups = [group for group, _ in trajectories]
    keys = [["", *(key for _, key in turns[1:])] for _, turns in trajectories]
    options = {**RAW, "gamma": gamma}
    found = by_turn("gigpo", batch(rewards, groups=groups, keys=keys), options)

    def later(i: int, k: int) -> float:
        return sum(gamma ** (j - k) * rewards[i][j] for j in range(k, len(rewards[i])))

    def state(i: int, k: int) -> tuple[int, bool, str]:
        return groups[i], k == 0, keys[i][k]

    every_turn = [(i, k) for i, row in enumerate(rewards) for k in range(len(row))]
    for i, k in every_turn:
        totals = [sum(rewards[j]) for j in range(len(groups)) if groups[j] == groups[i]]
        same = [later(*turn) for turn in every_turn if state(*turn) == state(i, k)]
        episode = totals[0] if len(totals) == 1 else sum(rewards[i]) - sum(totals) / len(totals)
        step = 0.0 if len(same) == 1 else later(i, k) - sum(same) / len(same)
        assert found[i][k] == pytest.approx(episode + step, abs=1e-5)


# -- what they reduce to -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mt_grpo", "gigpo"])
@given(rewards=st.lists(NUMBER, min_size=2, max_size=6), turns=st.integers(1, 3))
def test_without_credit_for_turns_it_is_grpo(name: str, rewards: list[float], turns: int):
    made = batch([[0.0] * (turns - 1) + [reward] for reward in rewards])
    options = {"turn_coef": 0.0}
    np.testing.assert_array_equal(by_turn(name, made, options), by_turn("grpo", made, {}))
