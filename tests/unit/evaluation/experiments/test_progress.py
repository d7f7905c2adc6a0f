"""How fast runs learn: area under the curve, sampled tokens to a threshold, censored runs."""

import pytest

from agent_r1.evaluation.experiments.cell import TableCell
from agent_r1.evaluation.experiments.estimates import measure_progress, tokens_to


def run(curve: list[float], tokens: int = 100) -> TableCell:
    return TableCell(settings={}, scores={}, curve=curve, tokens=[tokens] * len(curve))


def test_the_area_under_a_curve_is_a_share_of_the_steps():
    # (0 + 1/2 + 1/2 + 1) / 4
    found = measure_progress([run([0.0, 0.5, 0.5, 1.0])], None)
    assert found is not None
    assert found.area == 0.5


def test_tokens_are_counted_to_the_end_of_the_ten_steps_whose_mean_reaches_the_threshold():
    # Steps 1 to 5 are wrong, the others right: of steps 1 to 10 half is right, of 2 to 11 .6.
    learned = run([0.0] * 5 + [1.0] * 10)
    assert tokens_to(learned, 0.5) == 10 * 100
    assert tokens_to(learned, 0.6) == 11 * 100
    assert tokens_to(learned, 1.0) == 15 * 100


def test_tokens_of_every_step_count_as_many_as_were_sampled():
    # 1 + 2 + ... + 10, and 11 more.
    longer = run([0.0, *[1.0] * 10]).model_copy(update={"tokens": list(range(1, 12))})
    assert tokens_to(longer, 0.9) == 55
    assert tokens_to(longer, 1.0) == 66


@pytest.mark.parametrize("curve", [[1.0] * 9, [0.0, 1.0] * 10, []])
def test_a_few_lucky_steps_reach_no_threshold(curve: list[float]):
    assert tokens_to(run(curve), 0.6) is None


def test_a_run_that_never_reached_the_threshold_took_longer_than_any_that_did():
    fast, slow, never = run([1.0] * 10), run([1.0] * 10, 300), run([0.5] * 10)
    found = measure_progress([never, slow, fast], 0.9)
    assert found is not None
    # 10 x 100, 10 x 300 and longer: the middle one is 3,000. The areas are 1, 1 and 1/2.
    assert (found.reached, found.runs, found.median_tokens) == (2, 3, 3000)
    assert found.tokens == [None, 3000, 1000]
    assert found.area == pytest.approx(2.5 / 3)


def test_the_median_is_unknown_where_half_of_the_runs_are_censored():
    found = measure_progress([run([1.0] * 10), run([0.0] * 10)], 0.9)
    assert found is not None
    assert (found.reached, found.median_tokens) == (1, None)


def test_without_a_threshold_only_the_area_is_known_and_without_a_curve_nothing():
    found = measure_progress([run([0.5, 1.0]), run([])], None)
    assert found is not None
    assert (found.area, found.runs, found.reached, found.tokens) == (0.75, 1, None, None)
    assert measure_progress([run([])], 0.5) is None
