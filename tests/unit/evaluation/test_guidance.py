"""How well a scorer tells the candidates of a turn apart, and what is fitted: by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from agent_r1.evaluation.answer_file import Candidate, Place
from agent_r1.evaluation.guidance import Guidance, guidance
from agent_r1_proto.rewards import ScoreTurn


def candidate(
    value: float | None,
    outcomes: Sequence[float],
    *,
    share: float = 0.5,
    sample: int | None = 0,
    greedy: bool = False,
    calls: bool = True,
) -> Candidate:
    return Candidate(
        turn=ScoreTurn(text="t"),
        calls=calls,
        sample=sample,
        greedy=greedy,
        logprob=math.log(share),
        value=value,
        outcomes=list(outcomes),
    )


def place(*candidates: Candidate) -> Place:
    return Place(turns=[], candidates=list(candidates))


def pair(greedy_value: float, other_value: float, other: float = 1.0, greedy: float = 0.0) -> Place:
    """Return a state whose greedy turn, three times as likely, is worth less than the other."""
    return place(
        candidate(greedy_value, [greedy] * 2, share=0.6, greedy=True, sample=0),
        candidate(other_value, [other] * 2, share=0.2, sample=3),
    )


def test_pairs_that_are_in_order_are_counted_within_states_and_kinds():
    found = guidance(
        [
            pair(0.2, 0.8),  # in order
            pair(0.5, 0.5),  # a tie: half
            place(
                candidate(0.9, [0.0], greedy=True),
                candidate(0.9, [0.0], calls=False),  # an answer is not compared with a call
                candidate(0.3, [0.0, 1.0], sample=1),  # out of order with the first: 0 of 1
            ),
        ],
        1.0,
        4,
    )
    assert found.auc == pytest.approx((1.0 + 0.5 + 0.0) / 3)
    assert found.places == 3


def test_the_spread_that_a_scorer_sees_and_the_rest():
    # Around their means, values are -+0.1 and worth is -+0.5 in one state, -+0.3 in the other. The
    # slope is (0.1 * 0.5 * 2 + 0.1 * 0.3 * 2) / (4 * 0.01) = 4, so what is explained has the spread
    # 4 * 0.1 = 0.4, and the rest is -+0.1 everywhere.
    found = guidance([pair(0.4, 0.6), pair(0.4, 0.6, other=0.8, greedy=0.2)], 1.0, 4)
    assert (found.delta, found.sigma) == pytest.approx((0.4, 0.1))
    assert found.useful_width == pytest.approx(math.exp(16.0))


def test_what_continuations_differ_by_themselves_is_no_mistake_of_the_scorer():
    # Worth is -+0.5 around the mean and values do not see it, but outcomes of the better one are
    # 0 and 1, whose mean has the variance 0.5 / 2 = 0.25, as has the other: all of 0.5^2 = 0.25.
    noisy = place(candidate(0.1, [0.0, 0.0], greedy=True), candidate(0.9, [1.0, 1.0], sample=1))
    flat = place(candidate(0.5, [0.0, 1.0], greedy=True), candidate(0.5, [0.0, 1.0], sample=1))
    found = guidance([noisy, flat], 1.0, 4)
    # Slope (0.4 * 0.5 * 2) / (2 * 0.16) = 1.25; over four candidates, (1.25 * 0.4)^2 / 2 = 0.125
    # is explained; nothing is left but noise, of which the second state alone has 0.25.
    assert found.delta == pytest.approx(math.sqrt(0.125))
    assert found.sigma == 0.0


def test_a_scorer_that_sees_nothing_has_a_useful_width_of_one():
    found = guidance([pair(0.5, 0.5), pair(0.5, 0.5, other=0.0, greedy=1.0)], 1.0, 4)
    assert (found.delta, found.useful_width) == (0.0, 1.0)


def test_the_least_weight_is_fitted_that_takes_the_better_turn():
    # The other turn is behind by log 3 = 1.0986 and its value ahead by 0.6: beta must exceed 1.83,
    # and 2 is the first of the grid. It was the fourth to be sampled, so 2 candidates are too few.
    found = guidance([pair(0.2, 0.8)] * 8, 0.7, 8)
    assert (found.beta, found.candidates, found.temperature) == (2.0, 4, 0.7)
    # The greedy turn has the probability 0.6: it is not searched below 0.5, and is below 0.9.
    assert found.branch_below == 0.9
    assert found.gain == pytest.approx((1.0, 1.0, 1.0))
    assert found.why_not == ""


def test_answers_are_compared_with_calls_once_it_is_known_how_they_are_misjudged():
    # Answers are valued 0.5 too high, calls 0.1 too high: -0.4 makes them comparable. The answer
    # then is ahead by 1.5 - 0.4 - 0.1 = 1 where it is right and behind by 1 where it is wrong. It
    # is also behind by log 2 = 0.69, so that a beta of 0.5 is too small.
    right = place(
        candidate(0.1, [0.0], share=0.6, greedy=True),
        candidate(1.5, [1.0], share=0.3, calls=False, sample=1),
    )
    wrong = place(
        candidate(1.1, [1.0], share=0.6, greedy=True),
        candidate(0.5, [0.0], share=0.3, calls=False, sample=1),
    )
    found = guidance([right, wrong] * 4, 1.0, 8)
    assert found.answer_offset == pytest.approx(-0.4)
    assert (found.auc, found.gain[0], found.beta) == (1.0, 0.5, 1.0)


def test_answers_stay_apart_where_comparing_them_helps_nothing():
    # Values of answers say the opposite of what they are worth; those of calls are right.
    only = place(
        candidate(0.2, [0.0], share=0.5, greedy=True),
        candidate(0.8, [1.0], share=0.3, sample=1),
        candidate(0.0, [1.0], share=0.1, calls=False, sample=2),
    )
    other = place(
        candidate(0.2, [0.0], share=0.5, greedy=True),
        candidate(0.8, [1.0], share=0.3, sample=1),
        candidate(1.0, [0.0], share=0.1, calls=False, sample=2),
    )
    found = guidance([only, other] * 4, 1.0, 8)
    assert (found.answer_offset, found.auc, found.gain[0]) == (None, 1.0, 1.0)


def test_a_scorer_that_knows_nothing_leads_no_search():
    rng = random.Random(0)
    places = [
        place(
            *(
                candidate(rng.random(), [float(rng.random() < 0.5)] * 2, sample=i, greedy=i == 0)
                for i in range(4)
            )
        )
        for _ in range(200)
    ]
    found = guidance(places, 1.0, 4)
    assert found.auc == pytest.approx(0.5, abs=0.06)
    assert "60% are needed" in found.why_not


def test_a_scorer_that_is_right_but_changes_nothing_leads_no_search():
    # It sees at once that the greedy turn is the better one.
    found = guidance([pair(0.9, 0.1, other=0.0, greedy=1.0)] * 8, 1.0, 4)
    assert found.auc == 1.0
    assert found.gain == (0.0, 0.0, 0.0)
    assert "+0.000 [+0.000, +0.000] more than greedy ones" in found.why_not


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([], "no state had several candidates; raise the temperature"),
        ([place(candidate(None, [1.0], greedy=True))], "ask with a scorer and a beta above 0"),
        ([place(candidate(0.5, [1.0]))], "no greedy candidate"),
    ],
)
def test_what_cannot_be_measured_is_refused(places: list[Place], message: str):
    with pytest.raises(ValueError, match=message):
        guidance(places, 1.0, 4)


def test_guidance_is_written_and_read_again():
    found = guidance([pair(0.2, 0.8)] * 3, 1.0, 4)
    assert Guidance.model_validate_json(found.model_dump_json()) == found
