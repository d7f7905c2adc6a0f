"""What a run lost, and whether that is more than it may."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_r1.learner.outcome import Losses, finished_status, last_summary


def evaluation(n: int, failed: int) -> dict[str, object]:
    return {"sets": {"near": {"n": n, "failed": failed}}}


def test_the_share_is_taken_of_the_samples_that_have_a_final_result():
    losses = Losses.of({"filled": 15, "failed": 5, "reissued": 7, "duplicate": 3}, {})
    assert (losses.failed, losses.samples, losses.share) == (5, 20, 0.25)


def test_a_run_that_asked_for_nothing_lost_nothing():
    assert Losses.of({}, {}).share == 0.0
    assert Losses.of({}, {"after": evaluation(0, 0)}).problems(0.0) == []


def test_losses_within_the_limit_are_no_problem():
    losses = Losses.of({"filled": 19, "failed": 1}, {"after": evaluation(19, 1)})
    assert losses.problems(0.05) == []


def test_every_place_where_too_much_was_lost_is_named():
    evaluations = {"before": evaluation(20, 0), "after": evaluation(11, 9)}
    assert Losses.of({"filled": 9, "failed": 1}, evaluations).problems(0.05) == [
        "1 of the 10 training samples failed for good (10%)",
        "9 of the 20 questions of the evaluation after/near failed for good (45%)",
    ]


@pytest.mark.parametrize(
    ("summary", "status"),
    [
        ({"status": "finished", "steps": 50}, "finished"),
        ({"status": "finished_with_losses", "steps": 50}, "finished_with_losses"),
        ({"status": "finished", "steps": 60}, "finished"),  # it was longer then
        ({"status": "finished", "steps": 40}, None),  # it is to go on
        ({"status": "interrupted", "steps": 50}, None),
        ({"status": "failed", "steps": 50}, None),
    ],
)
def test_a_run_has_finished_when_it_has_ended_after_all_of_its_steps(
    summary: dict[str, object], status: str | None, tmp_path: Path
):
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert finished_status(tmp_path, total_steps=50) == status


def test_a_run_that_has_never_ended_has_not_finished(tmp_path: Path):
    assert finished_status(tmp_path, total_steps=50) is None


def test_evaluations_that_gave_up_leave_nothing_to_do(tmp_path: Path):
    summary = {"status": "finished", "steps": 6, "evaluations_since_best": 3}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert finished_status(tmp_path, total_steps=50, patience=3) == "finished"
    assert finished_status(tmp_path, total_steps=50, patience=4) is None
    assert finished_status(tmp_path, total_steps=50) is None


def test_the_summary_of_an_earlier_start_is_not_the_last_one(tmp_path: Path):
    (tmp_path / "summary.json").write_text(json.dumps({"status": "failed", "starts": 1}))
    (tmp_path / "ledger.json").write_text('{"incarnation": 1}')
    assert last_summary(tmp_path)["status"] == "failed"
    (tmp_path / "ledger.json").write_text('{"incarnation": 2}')
    assert last_summary(tmp_path) == {}
