"""The harness of the benchmarks: rounds, ratios, options, reports and their tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.processes import read_json_lines
from benchmarks.trl.__main__ import Cell, check_equal, figures
from scripts.generated import as_table


def test_sides_take_turns_at_being_first():
    calls: list[str] = []
    sides = {name: (lambda name=name: calls.append(name) or len(calls)) for name in ("a", "b")}
    assert harness.alternate(sides, 3) == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert calls == ["a", "b", "b", "a", "a", "b"]


def test_a_ratio_is_the_median_of_the_pairs():
    row = harness.compare("calls/s", [10.0, 30.0, 20.0], [10.0, 10.0, 5.0], "≥ 2")
    # 10/10, 30/10, 20/5: the median is 3; the medians of the sides are 20 and 10.
    assert row == {
        "what": "calls/s",
        "ours": 20.0,
        "other": 10.0,
        "ratio": 3.0,
        "smallest": 1.0,
        "largest": 4.0,
        "goal": "≥ 2, met",
    }
    assert "smallest" not in harness.compare("bytes", [1.0], [2.0])


@pytest.mark.parametrize(
    ("goal", "said"), [("≥ 0.5", "met"), ("≥ 0.6", "missed"), ("≤ 0.5", "met"), ("≤ 0.4", "missed")]
)
def test_a_goal_is_met_or_missed(goal: str, said: str):
    assert harness.compare("", [1.0], [2.0], goal)["goal"] == f"{goal}, {said}"


def test_a_table_has_every_column_and_numbers_of_three_digits():
    table = as_table([{"a": 12345, "b": 0.98765}, {"a": "x|y", "c": 1234.5}])
    assert table == "| a | b | c |\n|---|---|---|\n| 12,345 | 0.988 |  |\n| x\\|y |  | 1,234 |\n"


def test_options_have_the_type_of_their_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["case", "--rounds", "5", "--tokens", "1", "2"])
    options = harness.read_options("A case.", rounds=3, tokens=(512,), in_flight=16, again=())
    assert vars(options) == {"rounds": 5, "tokens": [1, 2], "in_flight": 16, "again": ()}


def test_a_report_holds_what_its_table_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness, "OUT", tmp_path)
    harness.write_report("case", [{"what": "a"}], limit=3)
    assert json.loads((tmp_path / "case.json").read_text()) == {"rows": [{"what": "a"}], "limit": 3}


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    assert read_json_lines(file) == []
    file.write_text('{"step": 1}\n{"st')
    assert read_json_lines(file) == [{"step": 1}]


STEP = {"trajectories": 8, "loss_tokens": 80, "computed_tokens": 160, "reward": 0.5}


def test_the_first_step_of_a_run_warms_up():
    seconds, cpu = (9.0, 2.0, 4.0), (5.0, 6.0, 10.0)
    lines = [{**STEP, "seconds": s, "cpu": c} for s, c in zip(seconds, cpu, strict=True)]
    found = figures(lines)
    # 8 trajectories in 3 s, the median of 2 and 4; in 2.5 CPU s, the median of 1 and 4.
    assert found["a second"] == pytest.approx(8 / 3)
    assert found["a CPU second"] == pytest.approx(8 / 2.5)
    assert found["runs an hour"] == 3600 / 15
    assert (found["loss_tokens"], found["computed_tokens"]) == (10, 20)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"trajectories": [8, 7]}, r"TRL trained \[8, 7\] trajectories"),
        ({"loss_tokens": 12.0}, "10.0 tokens that carry loss, TRL's 12.0"),
    ],
)
def test_a_round_of_unequal_work_is_refused(theirs: dict[str, object], said: str):
    cell = Cell("≥ 1", questions=1, group_size=8)
    ours = {"trajectories": [8], "loss_tokens": 10.0, "last_reward": 0.0}
    check_equal(cell, ours, ours)
    with pytest.raises(RuntimeError, match=said):
        check_equal(cell, ours, ours | theirs)
