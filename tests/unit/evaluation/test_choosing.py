"""Choosing from a pool of answers: numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.evaluation.answer_file import CallLine, TurnLine
from agent_r1.evaluation.choosing import calls_of, choose, enough, tokens_of
from tests.unit.evaluation.lines import answer

SAID = ("Rome", "Paris", "paris", "Rome ")


def pool(name: str = "q", said: tuple[str, ...] = SAID) -> list[Any]:
    """Answers of 10, 20, 30, … tokens; the n-th costs n calls, and the critic likes the third."""
    return [
        answer(
            name,
            attempt=i,
            prediction=text,
            sampled_tokens=10 * (i + 1),
            seconds=1.0,
            turns=[TurnLine(text="", calls=[CallLine(tool="search", status="ok")] * i)],
            components={"exact_match": float(i == 2), "critic": float(-abs(i - 2))},
            component_tokens={"critic": 100 + i},
        )
        for i, text in enumerate(said)
    ]


def test_the_most_frequent_of_the_first_answers_is_chosen_and_all_of_them_are_paid_for():
    [found] = choose(reversed(pool()), 3, None)
    assert (found.prediction, found.attempt) == ("Paris", 0)
    # 10 + 20 + 30 tokens; 0 + 1 + 2 calls, of which the chosen one made 1
    assert (found.sampled_tokens, found.discarded_calls, found.scorer_tokens) == (60, 2, 0)
    assert found.scores == 0
    [two] = choose(pool(), 2, None)
    assert two.prediction == "Rome"


def test_the_best_of_the_first_answers_is_chosen_by_its_scorer():
    [found] = choose(pool(), 4, "critic")
    assert found.components["exact_match"] == 1.0
    # 100 + 101 + 102 + 103 tokens of the scorer
    assert (found.sampled_tokens, found.scorer_tokens, found.discarded_calls) == (100, 406, 4)
    assert found.scores == 4
    [two] = choose(pool(), 2, "critic")
    assert two.prediction == "Paris"
    with pytest.raises(ValueError, match="no component 'reward_model'"):
        choose(pool(), 2, "reward_model")


def test_a_question_of_which_an_answer_failed_has_failed():
    answers = pool()
    answers[1] = answer("q", attempt=1, failed=True)
    assert [one.failed for one in choose(answers, 2, "critic")] == [True]
    assert [one.failed for one in choose(answers, 1, "critic")] == [False]


@pytest.mark.parametrize(
    ("tokens", "fewest", "number"),
    [
        (30, 1, 2),  # 10, then 10 + 20
        (31, 1, 3),
        (30, 3, 3),
        (1000, 1, 4),  # more than all of them
    ],
)
def test_as_many_answers_are_enough_as_cost_so_many_tokens(tokens: int, fewest: int, number: int):
    assert enough([*pool("a"), *pool("b")], tokens_of, tokens, fewest) == number


@pytest.mark.parametrize(("calls", "number"), [(0, 1), (0.5, 2), (2, 3), (6, 4)])
def test_as_many_answers_are_enough_as_make_so_many_calls(calls: float, number: int):
    # 0, then 0 + 1, 0 + 1 + 2, 0 + 1 + 2 + 3.
    assert enough([*pool("a"), *pool("b")], calls_of, calls, 1) == number
