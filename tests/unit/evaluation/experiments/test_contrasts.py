"""Contrasts of a table: differences by seed and their tests."""

import pytest

from agent_r1.evaluation.experiments.cell import TableCell
from agent_r1.evaluation.experiments.contrasts import judge_contrasts, seed_differences


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
