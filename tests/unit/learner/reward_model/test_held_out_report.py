"""What a report says of a reward model: rank within tasks, calibration, the view from outside."""

from __future__ import annotations

import numpy as np
import pytest

from agent_r1.learner.reward_model.data import JudgedEpisode
from agent_r1.learner.reward_model.held_out_report import (
    auc_within_tasks,
    calibration_error,
    well_formed,
)


def test_pairs_of_one_task_are_ranked_and_ties_count_half():
    scores = np.array([0.9, 0.2, 0.5, 0.5, 0.1, 0.8])
    labels = np.array([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    tasks = np.array(["a", "a", "b", "b", "c", "c"])
    # a: one pair, in order: 1. b: one pair, a tie: 1/2. c has no bad one. Mean 3/4.
    assert auc_within_tasks(scores, labels, tasks) == 0.75
    # Between tasks nothing is compared: a task whose scores are all high is no better.
    assert auc_within_tasks(scores + np.array([0, 0, 9, 9, 0, 0]), labels, tasks) == 0.75
    assert auc_within_tasks(scores[4:], labels[4:], tasks[4:]) is None


def test_calibration_error_weighs_the_bins_by_their_size():
    scores = np.array([0.05, 0.05, 0.95, 0.95])
    labels = np.array([0.0, 1.0, 1.0, 1.0])
    # First bin: mean score .05, mean label .5: .45. Last: .95 against 1: .05. Halves: .25.
    assert calibration_error(scores, labels) == pytest.approx(0.25)
    assert calibration_error(np.zeros(0), np.zeros(0)) is None


@pytest.mark.parametrize(
    ("status", "calls", "expected"),
    [
        ("COMPLETED", ["ok"], True),
        ("COMPLETED", ["ok", "malformed"], False),
        ("TRUNCATED", ["ok"], False),
    ],
)
def test_only_completed_episodes_without_malformed_calls_are_compared(
    status: str, calls: list[str], expected: bool
):
    assert well_formed(JudgedEpisode("t", status, [], [], calls, 1.0)) is expected
