"""Comparisons fixed beforehand: of methods by seed, of ways to decode by question."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.evaluation.experiments.cell import MatrixCell, TableCell
from agent_r1.evaluation.experiments.config import ComparisonEntry
from agent_r1.evaluation.experiments.contrasts import (
    compare,
    judge_contrasts,
    reached,
    seed_differences,
)
from agent_r1.evaluation.statistics import Estimate


def run(seed: int, **scores: list[float | None]) -> TableCell:
    return TableCell(settings={"run.seed": seed}, scores=scores)


def test_differences_are_taken_between_runs_of_the_same_seed():
    first = [run(0, a=[0.0, 1.0], b=[0.0]), run(1, a=[0.0, 0.0], b=[0.0])]
    second = [run(2, a=[1.0, 1.0], b=[1.0]), run(0, a=[1.0, 1.0], b=[0.0])]
    # Seed 0: 1 - 1/2 on a; over both sets (1 + 0) / 2 - (1/2 + 0) / 2.
    assert seed_differences(first, second, ["a"]) == [0.5]
    assert seed_differences(first, second, ["a", "b"]) == [0.25]


def test_a_failed_question_counts_in_no_difference():
    # 1 of the one question that is left, minus 1/2.
    assert seed_differences([run(0, a=[0.0, 1.0])], [run(0, a=[None, 1.0])], ["a"]) == [0.5]


def test_p_values_are_adjusted_for_the_contrasts_that_have_seeds():
    found = judge_contrasts(
        [
            ("ppo", "grpo", "average", [0.1] * 8),
            ("grpo", "gigpo", "average", []),
            ("ppo", "ppo_no_mask", "a", [0.1, -0.1]),
        ]
    )
    assert [contrast["mean"] for contrast in found] == [pytest.approx(0.1), None, 0.0]
    # Of 8 differences of one sign 2 of 256 patterns are as far; of +-.1, +-.1 all four are at
    # least 0 away. The smaller one is doubled.
    assert [contrast["p"] for contrast in found] == [2 / 256, None, 1.0]
    assert [contrast["p_holm"] for contrast in found] == [4 / 256, None, 1.0]


def cell(scores: dict[str, float], tokens: float = 80.0, **changes: Any) -> MatrixCell:
    mean = sum(scores.values()) / len(scores)
    fields: dict[str, Any] = {
        "settings": {},
        "n": len(scores),
        "failed": 0,
        "score": (mean, mean, mean),
        "extra": None,
        "sampled_tokens": (tokens, tokens, tokens),
        "calls": (1.0, 1.0, 1.0),
        "seconds": (1.0, 1.0, 1.0),
        "scores": scores,
    }
    return MatrixCell(**(fields | changes))


def entry(**changes: Any) -> ComparisonEntry:
    fields = {"name": "primary", "first": "best", "second": "guided", "sets": ["s"]}
    return ComparisonEntry.model_validate({**fields, "goal": "better", "margin": 0.05} | changes)


def test_a_comparison_pairs_questions_and_averages_models_question_by_question():
    cells = {
        "one": {
            "greedy": cell({"a": 0.0, "b": 1.0, "c": 0.0}),
            "best": cell({"a": 0.0, "b": 1.0, "c": 0.0}, candidates=9),
            "guided": cell({"a": 1.0, "b": 1.0, "c": 0.0}, 72.0),
        },
        "two": {
            "best": cell({"a": 0.0, "b": 1.0}, candidates=8),
            "guided": cell({"a": 1.0, "b": 1.0, "c": 1.0}, 75.0),
        },
    }
    found = compare(entry(), "s", cells)
    one, two, both = found["rows"]
    assert [one["first"], one["second"]] == pytest.approx([1 / 3, 2 / 3], abs=1e-4)
    assert (one["greedy"], two["greedy"]) == (0.3333, None)
    # Of c, model two has nothing in the first way: a and b are left.
    assert (two["n"], both["n"]) == (2, 2)
    assert both["difference"][0] == 0.5  # a: (1 + 1) / 2; b: 0
    assert both["tokens"] == [80.0, 73.5]
    assert both["candidates"] == [9, 8]


def test_a_comparison_without_a_cell_says_which():
    found = compare(entry(), "s", {"one": {"best": cell({"a": 1.0})}})
    assert (found["missing"], found["reached"], found["rows"]) == (["one: guided"], None, [])


@pytest.mark.parametrize(
    ("goal", "margin", "difference", "so"),
    [
        ("better", 0.05, (0.06, 0.01, 0.1), True),
        ("better", 0.05, (0.06, -0.01, 0.1), False),
        ("better", 0.05, (0.04, 0.01, 0.1), False),
        ("not_worse", 0.03, (-0.02, -0.04, 0.01), True),
        ("not_worse", 0.03, (-0.02, -0.04, -0.01), False),
        ("not_worse", 0.03, (-0.04, -0.09, 0.01), False),
        ("not_worse", 0.03, (-0.04, -0.09, -0.01), False),
    ],
)
def test_what_was_expected_is_held_against_mean_and_interval(
    goal: str, margin: float, difference: tuple[float, float, float], so: bool
):
    assert reached(entry(goal=goal, margin=margin), Estimate(*difference)) is so
