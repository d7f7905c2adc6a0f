"""Intervals and tests, against closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.evaluation import statistics
from agent_r1.evaluation.statistics import (
    Estimate,
    bootstrap_mean,
    crossed_means,
    holm,
    least_sign_flip_p,
    mcnemar_exact,
    paired_difference,
    pass_all,
    pass_at,
    sign_flip_exact,
)

VALUES = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12)


# --- bootstrap ----------------------------------------------------------------------------------


def test_the_interval_of_a_coin_is_that_of_the_binomial():
    # 50 of 100: resampled means are Binomial(100, 1/2) / 100, whose 2.5 % quantile is 40 and whose
    # 97.5 % quantile is 60 (P(X <= 39) = 0.0176, P(X <= 40) = 0.0284, symmetric).
    estimate = bootstrap_mean([1.0] * 50 + [0.0] * 50)
    assert estimate.mean == 0.5
    assert (estimate.low, estimate.high) == (pytest.approx(0.40), pytest.approx(0.60))


@pytest.mark.parametrize("n", [400, 1600])
def test_the_width_is_that_of_the_normal_approximation(n: int):
    # Half 1 and half -1: standard deviation 1, so 2 * 1.96 / sqrt(n) (0.196 and 0.098).
    estimate = bootstrap_mean([1.0, -1.0] * (n // 2))
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 / math.sqrt(n), rel=0.04)


def test_a_wider_level_gives_a_wider_interval():
    values = [float(i % 7) for i in range(50)]
    half, most = bootstrap_mean(values, level=0.5), bootstrap_mean(values, level=0.99)
    assert most.low < half.low < half.high < most.high


def test_equal_values_leave_no_doubt():
    assert bootstrap_mean([0.1] * 7) == Estimate(0.1, 0.1, 0.1)
    assert bootstrap_mean([3.0]) == Estimate(3.0, 3.0, 3.0)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_the_interval_contains_the_mean_and_stays_within_the_values(values: list[float]):
    estimate = bootstrap_mean(values, resamples=40)
    assert estimate.low <= estimate.mean <= estimate.high
    assert estimate.mean == pytest.approx(sum(values) / len(values), abs=1e-9)
    assert min(values) - 1e-9 <= estimate.low
    assert estimate.high <= max(values) + 1e-9


def test_the_same_seed_gives_the_same_interval_and_another_one_another():
    values = np.random.default_rng(0).normal(size=30).tolist()
    assert bootstrap_mean(values) == bootstrap_mean(values)
    assert bootstrap_mean(values) != bootstrap_mean(values, seed=1)


def test_draws_in_parts_are_the_same_draws(monkeypatch: pytest.MonkeyPatch):
    values = [float(i) for i in range(20)]
    whole = bootstrap_mean(values)
    monkeypatch.setattr(statistics, "MAX_DRAWS", 20 * 7)
    assert bootstrap_mean(values) == whole


@pytest.mark.parametrize(
    ("values", "message"),
    [([], "is empty"), ([0.0, math.nan], "not finite"), ([math.inf], "not finite")],
)
def test_what_has_no_mean_is_refused(values: list[float], message: str):
    with pytest.raises(ValueError, match=message):
        bootstrap_mean(values)


# --- seeds that answer the same questions -------------------------------------------------------


def crossed(scores: list[list[float]], resamples: int = 4_000) -> np.ndarray:
    """Return the resampled means of [S, N] scores."""
    drawn = np.random.default_rng(1).integers(0, len(scores), size=(resamples, len(scores)))
    return crossed_means(np.array(scores), drawn, np.random.default_rng(2))


def test_a_question_that_is_drawn_is_drawn_for_every_seed():
    # One of two seeds answers one of two questions. The mean is the share of draws that took that
    # seed (0, 1/2, 1 with 1/4, 1/2, 1/4) times the share that took that question (the same):
    # 0 has 1 - 3/4 * 3/4 = 7/16, 1/4 has 1/4, 1/2 has 2 * 1/2 * 1/4 = 1/4, and 1 has 1/16.
    means = crossed([[1.0, 0.0], [0.0, 0.0]])
    shares = [np.mean(means == value) for value in (0.0, 0.25, 0.5, 1.0)]
    assert shares == pytest.approx([7 / 16, 1 / 4, 1 / 4, 1 / 16], abs=0.025)


def test_equal_seeds_are_no_more_questions_than_one():
    # 100 questions, half right: 1/2 -+ sqrt(1/4 / 100) = 0.05, however many seeds say the same.
    for num_seeds in (1, 8):
        means = crossed([[0.0, 1.0] * 50] * num_seeds)
        assert np.std(means) == pytest.approx(0.05, rel=0.05)


def test_a_failed_question_counts_in_no_mean_of_its_seed_and_leaves_the_others_paired():
    # What is left of seed 0 is always 1, also where only the failed question is drawn. Seed 1 is
    # always 0. So only the seeds vary: 0, 1/2 and 1 with 1/4, 1/2 and 1/4.
    means = crossed([[math.nan, 1.0], [0.0, 0.0]])
    shares = [np.mean(means == value) for value in (0.0, 0.5, 1.0)]
    assert shares == pytest.approx([1 / 4, 1 / 2, 1 / 4], abs=0.025)


def test_questions_in_parts_are_the_same_questions(monkeypatch: pytest.MonkeyPatch):
    scores = [[float(i) for i in range(20)], [float(i % 3) for i in range(20)]]
    whole = crossed(scores, 50)
    monkeypatch.setattr(statistics, "MAX_DRAWS", 20 * 8)
    assert crossed(scores, 50) == pytest.approx(whole)


def test_intervals_over_seeds_and_questions_hold_the_mean_as_often_as_they_say():
    # 100 questions, which 20 % or 80 % of all runs answer, by 8 seeds that are 10 % better or
    # worse than others: the mean over all questions and seeds is 1/2. Of 300 intervals of 95 %,
    # 285 hold it, with a standard deviation of sqrt(300 * .95 * .05) = 3.8.
    rng = np.random.default_rng(0)
    held = held_apart = 0
    for _ in range(300):
        chance = rng.choice([0.2, 0.8], 100) + rng.choice([-0.1, 0.1], (8, 1))
        scores = (rng.random(chance.shape) < chance).astype(float)
        drawn = rng.integers(0, 8, size=(400, 8))
        low, high = np.quantile(crossed_means(scores, drawn, rng), [0.025, 0.975])
        held += low <= 0.5 <= high
        # Drawn anew for each seed, the questions seem to be 800.
        apart = [np.mean(rng.choice(seed, (400, 100)), axis=1) for seed in scores]
        low, high = np.quantile(np.mean(apart, axis=0), [0.025, 0.975])
        held_apart += low <= 0.5 <= high
    assert 270 <= held <= 297
    assert held_apart < 200


# --- paired difference --------------------------------------------------------------------------


def test_a_constant_gain_on_hard_and_easy_questions_is_certain():
    # Unpaired, 0.1 would drown in the spread of the questions.
    first = [0.0, 0.5, 0.9, 0.2, 0.7]
    gain = paired_difference(first, [value + 0.125 for value in first])
    assert gain.mean == pytest.approx(0.125)
    assert gain.high - gain.low < 1e-9


@settings(max_examples=30, deadline=None)
@given(VALUES)
def test_nothing_differs_from_itself(values: list[float]):
    assert paired_difference(values, values) == Estimate(0.0, 0.0, 0.0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=20))
def test_the_other_way_round_only_the_sign_changes(pairs: list[tuple[int, int]]):
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    there, back = paired_difference(a, b, resamples=99), paired_difference(b, a, resamples=99)
    assert (there.mean, there.low, there.high) == pytest.approx((-back.mean, -back.high, -back.low))


def test_different_lengths_are_refused():
    with pytest.raises(ValueError, match="first_N has 2 values and second_N 1"):
        paired_difference([1.0, 2.0], [1.0])


# --- McNemar ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [
        # 2 * (C(10,0) + C(10,1) + C(10,2)) / 2^10 = 2 * 56 / 1024
        (8, 2, 0.109375),
        (2, 8, 0.109375),
        (0, 0, 1.0),
        (5, 0, 2 / 32),
        (1, 0, 1.0),  # 2 * 1 / 2
        (3, 3, 1.0),  # 2 * (1 + 6 + 15 + 20) / 64 > 1
        # 2 * (1 + 12 + 66) / 4096
        (10, 2, 158 / 4096),
    ],
)
def test_mcnemar(only_first: int, only_second: int, p: float):
    assert mcnemar_exact(only_first, only_second) == p


def test_mcnemar_holds_with_thousands_of_questions():
    # n = 4000, 3 standard deviations (sqrt(4000) / 2 = 31.6) off the middle: near the normal
    # 2 * (1 - Phi(94.5 / 31.62)) = 0.0028, with the continuity correction.
    assert mcnemar_exact(2095, 1905) == pytest.approx(0.00280, abs=2e-5)


@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemar_is_a_symmetric_probability(b: int, c: int):
    p = mcnemar_exact(b, c)
    assert 0.0 < p <= 1.0
    assert p == mcnemar_exact(c, b)
    assert mcnemar_exact(b + 1, min(b, c)) <= mcnemar_exact(b, min(b, c))


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="must not be negative"):
        mcnemar_exact(-1, 2)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_rates_are_shares_of_all_draws(k: int):
    outcomes = [True, False, False, True]
    draws = list(itertools.combinations(outcomes, k))
    some, every = sum(map(any, draws)), sum(map(all, draws))
    assert pass_at(k, 2, 4) == pytest.approx(some / len(draws))
    assert pass_all(k, 2, 4) == pytest.approx(every / len(draws))


# --- sign flips and Holm ------------------------------------------------------------------------


def test_eight_differences_of_one_sign_have_the_smallest_p_value():
    # Only all plus and all minus are as far from 0: 2 of 2^8 patterns.
    assert sign_flip_exact([0.1] * 8) == 2 / 256


@pytest.mark.parametrize(("num_seeds", "p"), [(1, 1.0), (2, 0.5), (3, 0.25), (8, 0.0078125)])
def test_no_differences_of_so_many_seeds_have_a_smaller_p_value(num_seeds: int, p: float):
    # Of 2^S patterns, two are as far from 0 as all of one sign: 2 / 2^S.
    assert least_sign_flip_p(num_seeds) == p == sign_flip_exact([0.1] * num_seeds)


def test_a_sign_flip_counts_the_patterns_at_least_as_far_from_zero():
    # |1 + 2 - 3| = 0, and every pattern is at least that far.
    assert sign_flip_exact([1, 2, -3]) == 1.0
    # |3 + 2 - 1| = 4. Of the 8 sums of +-1 +-2 +-3 (6, 4, 2, 0, 0, -2, -4, -6), four are as far.
    assert sign_flip_exact([-1, 2, 3]) == 0.5


def test_rounding_does_not_make_a_pattern_look_nearer():
    # 0.1 + 0.2 + 0.3 differs from 0.3 + 0.2 + 0.1 in the last digit; both are as far as can be.
    assert sign_flip_exact([0.1, 0.2, 0.3]) == sign_flip_exact([0.3, 0.2, 0.1]) == 0.25


def test_a_sign_flip_of_too_many_differences_is_refused():
    with pytest.raises(ValueError, match="has 17 values"):
        sign_flip_exact([1.0] * 17)


def test_holm_multiplies_by_what_is_left_and_never_falls():
    # Sorted .01, .02, .03, .04: times 4, 3, 2, 1 is .04, .06, .06, .04; the last may not be below
    # the one before it.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
