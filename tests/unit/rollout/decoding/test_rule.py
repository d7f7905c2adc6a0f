"""The rule of value-guided decoding and the drawing of a beam, worked out by hand."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from agent_r1.rollout.decoding.particles import Particle, draw, effective, elected, resampled
from agent_r1.runtime.tilting import Proposal, log_sum, tilted


def test_a_candidate_counts_its_probability_times_its_advantage():
    # pi = 0.2 and 0.6, which is 1/4 and 3/4 of the two. The mean value is 1/4 * 0.9 + 3/4 * 0.1 =
    # 0.3, so the advantages are 0.6 and -0.2; with beta = 2 they add 1.2 and -0.4.
    found = tilted([Proposal(math.log(0.2), True, 0.9), Proposal(math.log(0.6), True, 0.1)], 2.0)
    assert found == pytest.approx([math.log(0.25) + 1.2, math.log(0.75) - 0.4])


def test_answers_are_compared_with_answers_and_calls_with_calls():
    # Two calls of 0.4 and 0.4 with values 0.2 and 0.6 (mean 0.4), and one answer of 0.2, whose
    # advantage over itself is 0 whatever it is worth.
    candidates = [
        Proposal(math.log(0.4), True, 0.2),
        Proposal(math.log(0.4), True, 0.6),
        Proposal(math.log(0.2), False, 1.0),
    ]
    wanted = [math.log(0.4) - 1.0, math.log(0.4) + 1.0, math.log(0.2)]
    assert tilted(candidates, 5.0) == pytest.approx(wanted)


def test_a_bias_is_of_answers_alone():
    candidates = [Proposal(math.log(0.4), True), Proposal(math.log(0.6), False)]
    wanted = [math.log(0.4), math.log(0.6) - 1.5]
    assert tilted(candidates, 0.0, answer_bias=-1.5) == pytest.approx(wanted)


def test_with_beta_0_only_probability_counts():
    found = tilted([Proposal(-3.0, True, 1.0), Proposal(-2.0, False, 0.0)], 0.0)
    assert found[1] - found[0] == pytest.approx(1.0)
    assert math.exp(found[0]) + math.exp(found[1]) == pytest.approx(1.0)


def test_logs_of_tiny_weights_do_not_vanish():
    assert log_sum([-1000.0, -1000.0]) == pytest.approx(-1000.0 + math.log(2))
    # 1, 1 and 2: (1 + 1 + 2)^2 / (1 + 1 + 4) = 16 / 6.
    logs = [-900.0, -900.0, -900.0 + math.log(2)]
    assert effective(logs) == pytest.approx(16 / 6)


def test_what_has_a_share_is_drawn_as_often_up_to_rounding():
    # Shares 0.5, 0.3, 0.2 of 5 draws: 2.5, 1.5 and 1.
    logs = [math.log(share) - 700.0 for share in (0.5, 0.3, 0.2)]
    drawn = [draw(logs, 5, random.Random(seed)) for seed in range(400)]
    assert all(sum(counts) == 5 for counts in drawn)
    for i, allowed in enumerate(({2, 3}, {1, 2}, {0, 1, 2})):
        assert {counts[i] for counts in drawn} <= allowed
    assert sum(counts[0] for counts in drawn) / 400 == pytest.approx(2.5, abs=0.1)


def test_an_impossible_candidate_is_never_drawn():
    assert all(
        draw([-math.inf, 0.0, -math.inf], 3, random.Random(seed)) == [0, 3, 0] for seed in range(20)
    )


def particle(name: Any, *, copies: int = 1, log_weight: float = 0.0, counts: Any = None) -> Any:
    made = Particle(name, copies, log_weight)
    if counts is not None:
        candidates: Any = [f"{name}{i}" for i in range(len(counts))]
        made.candidates = candidates
        made.tilted = [math.log(count) for count in counts]
    return made


def test_branches_of_equal_weight_are_followed_by_their_own_candidates():
    # Both gain a factor of 1, so all 4 copies weigh the same: the effective number is 4.
    found = resampled(
        [
            particle("a", copies=2, counts=[0.5, 0.5]),
            particle("b", copies=2, log_weight=0.0, counts=[1.0]),
        ],
        random.Random(0),
    )
    assert sorted((p.branch, p.copies) for p in found) == [("a0", 1), ("a1", 1), ("b0", 2)]
    assert [p.log_weight for p in found] == pytest.approx([0.0] * 3)


def test_a_factor_that_candidates_gain_stays_with_their_branch():
    # a counts 1.5 in all: its heirs weigh log 1.5 each. Effective: (1.5 + 1)^2 / (2.25 + 1) = 1.92.
    found = resampled(
        [particle("a", counts=[1.5]), particle("b", log_weight=0.0)], random.Random(0)
    )
    assert {p.branch: p.log_weight for p in found} == pytest.approx({"a0": math.log(1.5), "b": 0.0})


def test_all_are_drawn_anew_where_few_carry_the_weight():
    # One of four copies weighs 97 times as much as each other: the effective number is
    # 100^2 / (97^2 + 3) = 1.06, below half of 4. Of 4 draws it gets 3.88, so 3 or 4.
    heavy = particle("h", log_weight=math.log(97.0), counts=[0.5, 0.5])
    rest = [particle(name) for name in "xyz"]
    found = resampled([heavy, *rest], random.Random(1))
    assert sum(p.copies for p in found) == 4
    assert sum(p.copies for p in found if p.branch in ("h0", "h1")) >= 3
    assert {p.log_weight for p in found} == {0.0}


@pytest.mark.parametrize("seed", range(10))
def test_every_copy_is_drawn_for(seed: int):
    # 3 copies of weight 1 and one of 9: 12^2 / (3 + 81) = 1.71 effective; shares 1/4 and 3/4 of 4.
    many, one = particle("m", copies=3), particle("o", log_weight=math.log(9.0))
    found = resampled([many, one], random.Random(seed))
    assert {p.branch: p.copies for p in found} == {"m": 1, "o": 3}


class Ended:
    """A branch with an answer."""

    def __init__(self, answer: str) -> None:
        self.last = SimpleNamespace(answer=answer)


def saying(answer: str, **changes: Any) -> Any:
    return particle(Ended(answer), **changes)


@pytest.mark.parametrize(
    ("others", "rivals", "value", "beta"),
    [
        # Of one copy each, "a" and "b" tie, and the first is elected; so what "b" has more decides.
        ({}, {"copies": 2}, 0.0, 1.0),
        ({}, {"log_weight": 0.1}, 0.0, 1.0),
        ({}, {}, 0.1, 1.0),
        # exp(1 * 0.5) = 1.65 is less than 2, and exp(2 * 0.5) = 2.72 is more.
        ({"copies": 2}, {}, 0.5, 2.0),
        # log 3 = 1.0986.
        ({"log_weight": 1.09}, {"copies": 3}, 0.0, 1.0),
    ],
)
def test_copies_weights_and_values_vote(
    others: dict[str, Any], rivals: dict[str, Any], value: float, beta: float
):
    first, second = saying("a", **others), saying("b", **rivals)
    assert elected([first, second], {second.branch: value}, beta) is second.branch


def test_too_little_of_each_elects_nobody_else():
    heavy = saying("a", copies=2)
    for rival, value in ((saying("b", log_weight=0.69), 0.0), (saying("b"), 0.69)):
        assert elected([heavy, rival], {rival.branch: value}, 1.0) is heavy.branch


def test_votes_for_one_answer_add_up_and_its_heaviest_branch_is_taken():
    # 1 + 1.5 against 2.
    branches = [saying("a"), saying("b", copies=2), saying("A", log_weight=math.log(1.5))]
    assert elected(branches, {}, 1.0) is branches[2].branch
