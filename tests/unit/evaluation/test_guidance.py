"""How well a scorer tells the candidates of a turn apart, and what is fitted: by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

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
    # slope is (0.1 * 0.5 * 2 + 0.1 * 0.3 * 2) / (4 * 0.01) = 4. Two of the four degrees of freedom
    # are those of the means: 4^2 * 4 * 0.01 / 2 = 0.32 is explained, 4 * 0.1^2 / 2 = 0.02 not.
    found = guidance([pair(0.4, 0.6), pair(0.4, 0.6, other=0.8, greedy=0.2)], 1.0, 4)
    assert (found.delta, found.sigma) == pytest.approx((math.sqrt(0.32), math.sqrt(0.02)))
    assert found.useful_width == pytest.approx(math.exp(16.0))


def test_what_continuations_differ_by_themselves_is_no_mistake_of_the_scorer():
    # Slope (0.4 * 0.5 * 2) / (2 * 0.16) = 1.25: 1.25^2 * 0.32 / 2 = 0.25 is explained, of two
    # degrees of freedom. Means of the outcomes 0 and 1 have the variance 0.5 / 2, and nothing else
    # is left.
    noisy = place(candidate(0.1, [0.0, 0.0], greedy=True), candidate(0.9, [1.0, 1.0], sample=1))
    flat = place(candidate(0.5, [0.0, 1.0], greedy=True), candidate(0.5, [0.0, 1.0], sample=1))
    found = guidance([noisy, flat], 1.0, 4)
    assert found.delta == pytest.approx(0.5)
    assert found.sigma == 0.0


@pytest.mark.parametrize("rivals", [1, 5])
def test_the_spread_that_a_scorer_does_not_see_is_that_of_any_number_of_candidates(rivals: int):
    # Worth has a spread of 0.2 that values do not see, and 4 outcomes with one of 0.3 between them.
    rng = random.Random(rivals)
    places = []
    for _ in range(600):
        worths = [rng.gauss(0.5, 0.2) for _ in range(rivals + 1)]
        places.append(
            place(
                *(
                    candidate(
                        rng.random(),
                        [rng.gauss(worth, 0.3) for _ in range(4)],
                        sample=i,
                        greedy=i == 0,
                    )
                    for i, worth in enumerate(worths)
                )
            )
        )
    found = guidance(places, 1.0, 2)
    assert found.sigma == pytest.approx(0.2, abs=0.02)


def test_a_scorer_that_sees_nothing_has_a_useful_width_of_one():
    found = guidance([pair(0.5, 0.5), pair(0.5, 0.5, other=0.0, greedy=1.0)], 1.0, 4)
    assert (found.delta, found.useful_width) == (0.0, 1.0)


def test_the_least_weight_is_fitted_that_takes_the_better_turn():
    # The other turn is behind by log 3 = 1.0986 and its value ahead by 0.6: beta must exceed 1.83,
    # and 2 is the first of the grid. It was the fourth to be sampled, so 2 candidates are too few.
    found = guidance([pair(0.2, 0.8)] * 100, 0.7, 8)
    assert (found.beta, found.candidates, found.temperature) == (2.0, 4, 0.7)
    # The greedy turn has the probability 0.6: it is not searched below 0.5, and is below 0.9.
    assert found.branch_below == 0.9
    assert found.answer_bias == 0.0
    assert found.gain == found.lead == pytest.approx((1.0, 1.0, 1.0))
    assert found.why_unled == found.why_not == ""


def test_where_to_branch_goes_by_the_greedy_turn_at_temperature_1():
    sure = pair(0.2, 0.8).model_copy(update={"greedy_logprob": math.log(0.95)})
    found = guidance([sure] * 100, 0.7, 8)
    assert (found.branch_below, found.gain[0]) == (None, 1.0)


def test_an_answer_is_not_taken_for_its_value():
    # It is valued most, but is less likely than the call; A is 0 for both. A bias would take it,
    # and then the scorer adds nothing.
    only = place(
        candidate(0.1, [1.0], share=0.6, greedy=True),
        candidate(0.9, [0.0], share=0.3, calls=False, sample=1),
    )
    found = guidance([only] * 100, 1.0, 8)
    assert (found.gain[0], found.answer_bias) == (0.0, 0.0)


def early(value: Callable[[], float], rng: random.Random) -> Place:
    """Return a state whose greedy turn is an answer, which a call would beat."""
    right = [float(rng.random() < share) for share in (0.3, 0.6, 0.6)]
    return place(
        candidate(value(), [right[0]], share=0.5, greedy=True, calls=False),
        candidate(value(), [right[1]], share=0.3, sample=1),
        candidate(value(), [right[2]], share=0.2, sample=2),
    )


@pytest.mark.parametrize("scorer", ["noise", "constant"])
def test_answers_that_come_too_early_need_no_scorer(scorer: str):
    rng = random.Random(1)
    value = rng.random if scorer == "noise" else lambda: 0.5
    found = guidance([early(value, rng) for _ in range(300)], 1.0, 4)
    # log 0.3 - log 0.5 = -0.51, and -1 is the first bias below.
    assert (found.beta, found.answer_bias, found.why_not) == (0.0, -1.0, "")
    assert found.gain[0] == pytest.approx(0.3, abs=0.09)
    assert "60% are needed" in found.why_unled


@pytest.mark.parametrize("seed", range(6))
def test_a_scorer_that_knows_nothing_leads_no_search(seed: int):
    rng = random.Random(seed)
    places = [
        place(
            *(
                candidate(
                    rng.random(),
                    [float(rng.random() < 0.5)] * 2,
                    share=0.25,
                    sample=i,
                    greedy=i == 0,
                    calls=i % 2 == 0,
                )
                for i in range(4)
            )
        )
        for _ in range(200)
    ]
    found = guidance(places, 1.0, 4)
    assert found.auc == pytest.approx(0.5, abs=0.09)
    assert "60% are needed" in found.why_unled
    assert found.beta == 0.0
    assert "more than greedy ones" in found.why_not


@pytest.mark.parametrize(("better", "beta"), [(3, 0.0), (20, 2.0)])
def test_a_scorer_leads_only_where_what_it_adds_is_no_chance(better: int, beta: float):
    # It is always right, but nearly always the greedy turn is the better one too. With 3 states of
    # 100 where it is not, a resample has none of them in 0.97^100 = 4.8 %: the interval reaches 0.
    agreed = pair(0.9, 0.1, other=0.0, greedy=1.0)
    found = guidance([pair(0.2, 0.8)] * better + [agreed] * (100 - better), 1.0, 4)
    assert (found.auc, found.beta) == (1.0, beta)
    assert found.lead[0] == pytest.approx(better / 100)
    assert (found.lead[1] > 0.0) == (found.why_unled == "") == (beta > 0.0)
    assert beta or found.why_unled.startswith("the scorer adds +0.030 [+0.000,")


def test_the_gain_is_that_of_settings_chosen_on_other_states():
    # Answers come too early in every other state and are right in the rest, so a bias against them
    # gains 1 here and loses 1 there. Chosen on the states where it gains, it is measured on those
    # where it loses; the others are measured without it.
    def state(answer: float, call: float) -> Place:
        return place(
            candidate(None, [answer] * 2, share=0.6, greedy=True, calls=False),
            candidate(None, [call] * 2, share=0.2, sample=1),
        )

    found = guidance([state(0.0, 1.0), state(1.0, 0.0)] * 60, 1.0, 4)
    assert found.gain[0] == -0.5
    assert "worth -0.500 [" in found.why_not


def test_too_few_states_decide_nothing():
    found = guidance([pair(0.2, 0.8)] * 99, 1.0, 4)
    assert found.gain[0] == 1.0
    assert found.why_not == "99 states had several candidates, and 100 are needed"


def test_a_scorer_that_is_right_but_changes_nothing_leads_no_search():
    # It sees at once that the greedy turn is the better one.
    found = guidance([pair(0.9, 0.1, other=0.0, greedy=1.0)] * 100, 1.0, 4)
    assert found.auc == 1.0
    assert found.gain == (0.0, 0.0, 0.0)
    assert "+0.000 [+0.000, +0.000] more than greedy ones" in found.why_not


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (
            [pair(0.2, 0.8), place(candidate(None, [1.0], greedy=True))],
            "some candidates have no value",
        ),
        ([place(candidate(0.5, [1.0]))], "no greedy candidate"),
    ],
)
def test_what_cannot_be_measured_is_refused(places: list[Place], message: str):
    with pytest.raises(ValueError, match=message):
        guidance(places, 1.0, 4)


def test_without_a_scorer_only_patience_is_fitted():
    early = place(
        candidate(None, [0.0] * 2, share=0.6, greedy=True, calls=False),
        candidate(None, [1.0] * 2, share=0.2, sample=3),
    )
    found = guidance([early] * 100, 1.0, 8)
    # The call is behind by log 3 = 1.0986: a bias of -1.5 is the first of the grid that takes it.
    assert (found.beta, found.answer_bias, found.candidates) == (0.0, -1.5, 4)
    assert (found.auc, found.why_unled, found.why_not) == (None, "no scorer was asked", "")
    assert (found.gain, found.lead) == ((1.0, 1.0, 1.0), (0.0, 0.0, 0.0))


def test_without_a_state_nothing_is_searched():
    found = guidance([], 1.0, 4)
    assert (found.candidates, found.beta, found.gain) == (0, 0.0, (0.0, 0.0, 0.0))
    assert found.why_not == "0 states had several candidates, and 100 are needed"


def test_guidance_is_written_and_read_again():
    found = guidance([pair(0.2, 0.8)] * 3, 1.0, 4)
    assert Guidance.model_validate_json(found.model_dump_json()) == found
