"""The figures of `agent-r1 diagnose` and their bounds."""

import pytest

from agent_r1.evaluation.diagnosis import (
    Figure,
    base_figures,
    scripted_figures,
    training_figures,
)


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures}


def test_a_figure_keeps_its_bound_at_the_bound():
    assert Figure("a", 0.5, 0.5, at_least=True).passed
    assert Figure("a", 0.5, 0.5, at_least=False).passed
    assert not Figure("a", 0.49, 0.5, at_least=True).passed
    assert not Figure("a", 0.51, 0.5, at_least=False).passed


def test_an_interval_that_reaches_zero_is_a_missed_bound():
    assert not Figure("a", 0.5, 0.1, at_least=True, low=0.0).passed
    assert Figure("a", 0.5, 0.1, at_least=True, low=0.01).passed


def test_the_line_says_value_bound_and_verdict():
    assert Figure("x", 0.25, 0.1, at_least=True, low=0.125).line().split() == [
        *("ok", "x", "0.250", "(at", "least", "0.1,", "interval", "from", "0.125)")
    ]
    assert Figure("x", 0.75, 0.5, at_least=False).line().startswith("missed")


def test_the_oracle_is_judged_on_every_set_and_of_the_others_the_best():
    oracle = {"a": [1.0, 1.0], "b": [1.0, 0.0]}
    others = {"lazy": {"a": [0.0, 0.0], "b": [1.0, 1.0]}, "blind": {"a": [1.0, 0.0], "b": [0.0, 0]}}
    figures = by_name(scripted_figures(oracle, others))
    assert figures["oracle, a"].passed
    assert not figures["oracle, b"].passed
    assert figures["blind, a"].value == 0.5
    assert figures["blind, a"].passed
    assert not figures["lazy, b"].passed
    assert len(figures) == 4


def test_without_scripted_policies_there_are_no_figures_of_them():
    assert scripted_figures(None, {}) == []


def test_pass_at_k_counts_questions_with_one_right_answer():
    # Two of four questions have a right answer among their two.
    sampled = {"a": [[0.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]}
    figures = by_name(base_figures({"a": [1.0, 0.0, 0.0, 0.0]}, sampled, 0.5))
    assert figures["greedy, a"].value == 0.25
    assert figures["pass@2, a"].value == 0.5


def test_a_question_with_a_failed_answer_is_left_out_of_pass_at_k():
    figures = by_name(base_figures({}, {"a": [[0.0, 1.0], [0.0]]}, 0.5))
    assert figures["pass@2, a"].value == 1.0


def test_groups_are_mixed_where_rewards_differ():
    figures = by_name(training_figures([[1, 1], [0, 0], [0, 1], [1, 1]], [0.2, 0.4], [0.8, 1.0]))
    assert figures["mixed groups"].value == 0.25
    assert not figures["mixed groups"].passed
    assert figures["gradient in one direction"].value == pytest.approx(0.3)
    assert figures["gradient in one direction"].passed
    assert figures["cosine with turn-level GAE"].value == pytest.approx(0.9)
