"""Curves: what is read of a growing file, which points are sent, what is smoothed and marked."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from agent_r1.console.series import (
    MOST_POINTS,
    MetricsCache,
    RunMetrics,
    points_each,
    read_marks,
    read_series,
    smooth,
    thin,
    version_of,
)
from tests.support.console_scene import append_lines, step_line


@pytest.fixture
def run(tmp_path: Path) -> RunMetrics:
    """A run of three steps; the second lacks the reward and has another metric."""
    second = {"step": 2, "loss/total": 0.5, "time/step_s": 1.0, "throughput/tokens_per_s": 50.0}
    append_lines(tmp_path / "metrics.jsonl", [step_line(1), second, step_line(3)])
    found = RunMetrics(tmp_path)
    found.update()
    return found


def test_a_metric_that_a_step_lacks_is_a_gap_in_its_column_alone(run: RunMetrics):
    assert np.isnan(run.column("reward/mean")).tolist() == [False, True, False]
    assert np.isnan(run.column("loss/total")).tolist() == [True, False, True]
    assert np.isnan(run.column("nobody/has_it")).all()
    assert "step" not in run.names
    assert read_series(run, "reward/mean", "step", 0.0, 100) == {
        "step": [1, 3],
        "y": [0.01, 0.03],
    }


def test_axes_add_up_what_the_steps_took(run: RunMetrics):
    # 2 s at 100 tokens/s, 1 s at 50, 2 s at 100
    assert run.axis("tokens").tolist() == [200.0, 250.0, 450.0]
    assert (run.axis("time") * 3600).tolist() == pytest.approx([2.0, 3.0, 5.0])


def test_only_whole_lines_are_read_and_the_rest_when_it_has_come(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    append_lines(file, [step_line(1)])
    text = json.dumps(step_line(2)) + "\n"
    with file.open("a") as lines:
        lines.write(text[:20])
    run = RunMetrics(tmp_path)
    run.update()
    assert run.steps.tolist() == [1]
    with file.open("a") as lines:
        lines.write(text[20:])
    run.update()
    assert run.steps.tolist() == [1, 2]


def test_a_learner_that_goes_back_to_its_checkpoint_takes_the_later_steps_away(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    append_lines(file, [step_line(step) for step in (1, 2, 3)])
    run = RunMetrics(tmp_path)
    run.update()
    again = [step_line(1), step_line(2, **{"reward/mean": 0.9})]
    (tmp_path / "new").write_text("".join(json.dumps(line) + "\n" for line in again))
    (tmp_path / "new").replace(file)
    run.update()
    assert run.steps.tolist() == [1, 2]
    assert run.column("reward/mean").tolist() == [0.01, 0.9]
    assert run.column("push/servers").size == 2


def test_thinned_curves_keep_every_extreme_and_both_ends():
    values = np.sin(np.arange(100_000) / 1000)
    values[54_321], values[77_777] = 9.0, -9.0
    places = thin(values, MOST_POINTS)
    assert len(places) <= MOST_POINTS
    assert {0, 54_321, 77_777, 99_999} <= set(places.tolist())
    assert (np.diff(places) > 0).all()
    assert thin(values[:10], 10).tolist() == list(range(10))


@pytest.mark.parametrize("most", [4, 5, 100, 101])
def test_no_more_points_are_sent_than_are_allowed(most: int):
    # In each stretch the least and the greatest differ, which is the most that is chosen.
    values = np.array([(-1.0) ** place * place for place in range(5000)])
    assert len(thin(values, most)) <= most


def test_smoothing_begins_without_bias():
    # means 0.5, 1.75, 2.375 over the sums of their weights 0.5, 0.75, 0.875
    found = smooth(np.array([1.0, 3.0, 3.0]), 0.5)
    assert found.tolist() == pytest.approx([1.0, 2.33333, 2.71429], abs=1e-5)


def test_a_chart_of_many_runs_sends_fewer_points_of_each():
    assert points_each(1) == MOST_POINTS
    assert points_each(20) * 20 == 8000
    assert points_each(0) == MOST_POINTS


def test_of_memory_the_runs_that_were_asked_for_last_keep_their_share(tmp_path: Path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        append_lines(tmp_path / name / "metrics.jsonl", [step_line(step) for step in range(1, 11)])
    with MetricsCache().reading([tmp_path / "a"]) as (one,):
        cells = one.cells
    cache = MetricsCache(most_cells=2 * cells)
    for name in ("a", "b", "a", "c"):
        with cache.reading([tmp_path / name]) as (run,):
            assert run.steps.size == 10
    assert list(cache._runs) == [tmp_path / "a", tmp_path / "c"]
    assert cache.cells == 2 * cells


def test_what_happened_stands_at_its_step(tmp_path: Path):
    append_lines(tmp_path / "metrics.jsonl", [step_line(step) for step in range(1, 6)])
    append_lines(tmp_path / "evaluations.jsonl", [{"step": 2, "name": "during", "sets": {}}])
    failure = {"step": 3, "where": "tools", "kind": "tool search: #"}
    append_lines(tmp_path / "failures.jsonl", [failure, {"step": None}])
    begun = {"source": "learner", "kind": "k", "what": "no samples", "remedy": "wait"}
    begun |= {"began_at": 1003.5}
    append_lines(tmp_path / "conditions.jsonl", [begun, begun | {"ended_at": 1004.0}])
    (tmp_path / "starts").mkdir()
    # The first start is none again; the third came after the last step, and has no place yet.
    for number, since in ((1, 999.0), (2, 1002.5), (3, 2000.0)):
        (tmp_path / "starts" / f"{number:06d}.json").write_text(json.dumps({"since": since}))
    run = RunMetrics(tmp_path)
    run.update()
    marks = [(m.step, m.kind, m.text) for m in read_marks(tmp_path, run) if m.kind != "push"]
    assert marks == [
        (0, "failure", "None: None"),
        (2, "evaluation", "evaluation during"),
        (3, "restart", "started again"),
        (3, "failure", "tools: tool search: #"),
        (4, "hindrance", "no samples"),
    ]
    pushes = [m.step for m in read_marks(tmp_path, run) if m.kind == "push"]
    assert pushes == [1, 2, 3, 4, 5]


def test_the_version_of_a_curve_changes_with_its_files_alone(tmp_path: Path):
    before = version_of([tmp_path], "x=step")
    assert version_of([tmp_path], "x=step") == before != version_of([tmp_path], "x=time")
    append_lines(tmp_path / "metrics.jsonl", [step_line(1)])
    assert version_of([tmp_path], "x=step") != before


def test_names_and_values_of_a_strange_file_do_no_harm(tmp_path: Path):
    lines: list[dict[str, object]] = [
        {"step": "one", "reward/mean": 1.0},
        {"step": 1, "reward/mean": "high", "flag": True, "half\ud800": 2.0, "void": None},
        {"reward/mean": 1.0},
    ]
    append_lines(tmp_path / "metrics.jsonl", lines)
    run = RunMetrics(tmp_path)
    run.update()
    assert run.names == ["half\ufffd"]
    assert not math.isnan(run.column("half\ufffd")[0])
