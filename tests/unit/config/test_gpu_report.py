"""When `agent-r1 check` says that figures for GPUs were compared with a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_r1.config.gpu_report import verdict_on_gpus


def write_report(path: Path, errors: dict[str, float], outcome: str = "passed") -> Path:
    memory = [{"what": what, "error": error} for what, error in errors.items()]
    report = {"outcome": outcome, "machine": {"device": "NVIDIA X"}, "memory": memory}
    path.write_text(json.dumps(report))
    return path


def test_a_report_within_a_fifth_names_the_gpu_and_the_largest_error(tmp_path: Path):
    report = write_report(tmp_path / "report.json", {"learner": -0.19, "rollout": 0.02})
    said = verdict_on_gpus(report)
    assert "unverified" not in said
    assert "learner, -19% of what NVIDIA X took" in said


@pytest.mark.parametrize("error", [0.21, -0.21])
def test_a_report_that_is_further_off_verifies_nothing(tmp_path: Path, error: float):
    said = verdict_on_gpus(write_report(tmp_path / "report.json", {"learner": error}))
    assert "unverified: one is off by more than 20%" in said


@pytest.mark.parametrize(("errors", "outcome"), [({}, "passed"), ({"learner": 0.1}, "failed")])
def test_a_run_that_measured_nothing_verifies_nothing(
    tmp_path: Path, errors: dict[str, float], outcome: str
):
    said = verdict_on_gpus(write_report(tmp_path / "report.json", errors, outcome))
    assert "unverified: no report compares them" in said


def test_without_a_report_figures_are_unverified(tmp_path: Path):
    assert "unverified" in verdict_on_gpus(tmp_path / "none.json")
