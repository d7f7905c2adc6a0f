"""What the terminal shows of a run."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_r1.config.run import Config, load_config
from agent_r1.evaluation.score_names import ScoreNames
from agent_r1.launch.local_view import (
    Tail,
    TrainingView,
    in_columns,
    in_line,
    program,
    step_values,
    total_steps,
)
from tests.support.config_scene import write_scene

METRICS = {
    "step": 2,
    "reward/mean": 0.25,
    "reward/exact_match": 0.5,
    "reward/format": 1.0,
    "calls/search": 1.5,
    "throughput/tokens_per_s": 1234.0,
    "queue/depth": 7.0,
    "staleness/max": 1.0,
    "policy/version": 2.0,
    "time/step_s": 3.0,
}


NAMES = ScoreNames(components=("exact_match",), tools=("search",))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(write_scene(tmp_path / "example"), ["learner.steps=10"], {}).config


def append(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def line_of(metrics: dict[str, Any], names: ScoreNames = NAMES) -> str:
    return in_line(step_values(metrics, names, 10, 24.0))


def test_a_step_is_one_line_with_everything_that_matters():
    assert line_of(METRICS) == (
        "step 2/10  reward 0.250  EM 0.500  search 1.50  tokens/s 1,234  queue 7  staleness 1  "
        "policy v2  left 24s"
    )


@pytest.mark.parametrize(("is_installed", "is_on_path"), [(1, 1), (1, 0), (0, 1)])
def test_programs_are_called_as_this_environment_has_them(
    is_installed: int, is_on_path: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if is_on_path else None)
    if is_installed:
        (tmp_path / "agent-r1").touch()
    by_path = "agent-r1" if is_on_path else str(tmp_path / "agent-r1")
    # An environment on top of another one has its packages, and no commands of its own.
    wanted = by_path if is_installed else f"{python} -m agent_r1.cli.main"
    assert program("agent-r1") == wanted


def test_a_task_of_another_kind_shows_its_own_components_and_tools_and_no_exact_match():
    names = ScoreNames(("desk:asked", "desk:brief", "answered"), ("notes", "clock"))
    metrics = {"step": 2, "reward/mean": 1.25, "reward/desk:asked": 1.0, "reward/desk:brief": 0.75}
    line = line_of(metrics | {"reward/answered": 0.5, "calls/notes": 2.0}, names)
    assert line.startswith(
        "step 2/10  reward 1.250  asked 1.000  brief 0.750  answered 0.500  notes 2.00  clock 0.00"
    )
    assert "EM" not in line
    assert "search" not in line


def test_two_components_of_one_name_keep_their_modules():
    names = ScoreNames(("a:score", "b:score", "b:other"))
    assert names.titles() == {"a:score": "a:score", "b:score": "b:score", "b:other": "other"}


def test_what_was_lost_stands_on_the_line_of_its_step_and_nowhere_else():
    losses = {"failures/failed": 3.0, "failures/dead_letters": 2.0, "staleness/late_share": 0.12}
    assert "search 1.50  failed 3  dead letters 2  late 12%  tokens/s" in line_of(METRICS | losses)
    nothing_learned = METRICS | {"batch/skipped_optimizer_steps": 2.0}
    assert "search 1.50  skipped optimizer steps 2  tokens/s" in line_of(nothing_learned)
    assert "search 1.50  tokens/s" in line_of(METRICS | dict.fromkeys(losses, 0.0))


def test_the_policy_and_what_went_wrong_stand_beside_the_reward():
    measured = {"loss/kl_ref": 0.0123, "policy/entropy": 0.75}
    wrong = {"tools/error_share": 0.25, "trajectory/truncated_share": 0.5, "failures/attempts": 3.0}
    assert "search 1.50  KL 0.012  entropy 0.750  tokens/s" in line_of(METRICS | measured)
    assert "search 1.50  tool errors 25%  truncated 50%  failed attempts 3  tokens/s" in (
        line_of(METRICS | wrong)
    )


def test_where_nothing_was_scored_no_number_is_shown():
    assert NAMES.line(None, {}, {}) == [("reward", "-"), ("EM", "-"), ("search", "-")]


def test_what_the_learner_does_not_report_is_a_dash():
    assert "EM -" in line_of({"step": 1, "reward/mean": 0.0})


def columns(metrics: dict[str, Any], names: ScoreNames) -> list[str]:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=80)
    console.print(in_columns(step_values(metrics, names, 10000, 36000.0)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_columns_of_a_long_run_fit_80_characters():
    long = {**METRICS, "step": 1234, "policy/version": 1234.0, "queue/depth": 1024.0}
    lines = columns(long, NAMES)
    assert len(lines) == 2
    assert "10h00m" in lines[1]


def test_columns_that_do_not_fit_go_below():
    names = ScoreNames([f"a_component_{i}" for i in range(4)], ["a_long_tool_name", "another_tool"])
    lines = columns(METRICS, names)
    assert len(lines) == 6  # three rows of names over values, one below the other in columns
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert all(name in text for name in (*names.components, *names.tools, "10h00m"))


def test_every_step_is_a_line_where_there_is_no_terminal(tmp_path: Path, config: Config):
    output = io.StringIO()
    view = TrainingView(tmp_path, config, output)
    view.update([])
    view.update(["search"])
    view.update(["search"])
    view.update([])
    append(tmp_path / "metrics.jsonl", {**METRICS, "step": 1}, METRICS)
    scores = {
        "reward": 0.5,
        "components": {"exact_match": 0.4, "format": 1.0},
        "calls": {"search": 1.25},
        "n": 191,
        "failed": 9,
    }
    append(
        tmp_path / "evaluations.jsonl", {"step": 0, "name": "before", "sets": {"held_out": scores}}
    )
    view.update([])
    view.event("!! rollout died")
    view.close()
    lines = output.getvalue().splitlines()
    assert lines[:2] == ["starting search", "services are up"]
    assert lines[2] == (
        "evaluation before at step 0: held_out reward 0.500  EM 0.400  search 1.25 "
        "(n 191, failed 9)"
    )
    assert lines[3].startswith("step 1/10 ")
    assert lines[4].endswith("left 24s")  # 8 steps of 3 s
    assert lines[5:] == ["!! rollout died"]


def test_a_resumed_run_shows_only_its_own_steps(tmp_path: Path, config: Config):
    append(tmp_path / "metrics.jsonl", METRICS)
    output = io.StringIO()
    view = TrainingView(tmp_path, config, output)
    append(tmp_path / "metrics.jsonl", {**METRICS, "step": 3})
    view.update([])
    view.close()
    assert [line.split()[1] for line in output.getvalue().splitlines()] == ["3/10"]


def test_a_line_that_is_being_written_is_not_read_yet(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert list(tail.new()) == []
    path.write_text('{"step": 1}\n{"ste')
    assert list(tail.new()) == [{"step": 1}]
    with path.open("a") as file:
        file.write('p": 2}\n')
    assert list(tail.new()) == [{"step": 2}]


def test_a_file_that_was_cut_back_by_a_resume_shows_only_what_follows(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    append(path, *({"step": step} for step in range(1, 7)))
    tail = Tail(path, from_end=True)
    cut = tmp_path / "new"
    append(cut, *({"step": step} for step in range(1, 5)))
    cut.replace(path)
    assert list(tail.new()) == []
    append(path, {"step": 5, "again": True})
    assert list(tail.new()) == [{"step": 5, "again": True}]
    # The next look may come when the file has grown beyond what was read of the one before.
    append(cut, {"step": 1}, {"step": 2}, *({"step": step} for step in range(13, 33)))
    cut.replace(path)
    assert [record["step"] for record in tail.new()] == list(range(13, 33))


def test_a_run_that_ends_while_services_start_does_not_say_that_they_are_up(
    tmp_path: Path, config: Config
):
    output = io.StringIO()
    view = TrainingView(tmp_path, config, output)
    view.update(["rollout"])
    view.close()
    assert output.getvalue().splitlines() == ["starting rollout"]


def test_steps_follow_from_epochs_when_none_are_given(config: Config):
    assert total_steps(config) == 10
    learner = config.learner.model_copy(update={"steps": None, "epochs": 6})
    # 2 tasks x 6 epochs / 2 groups a batch
    assert total_steps(config.model_copy(update={"learner": learner})) == 6


FAILURE = {
    "step": 1,
    "where": "reward",
    "kind": "reward_error: desk:brief: ValueError: no text",
    "reason": "reward_error: desk:brief: ValueError: no text\n  File desk.py, line 7, in brief",
    "rollout_id": "desk/1/0/0/0",
    "time": 12.5,
    "log": "logs/reward.log",
}


@pytest.mark.parametrize("terminal", [False, True])
def test_the_first_failure_of_a_kind_is_loud_at_once_and_stays(
    tmp_path: Path, config: Config, terminal: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TERM", "xterm")
    output = io.StringIO()
    output.isatty = lambda: terminal
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "reward.log").touch()
    view = TrainingView(tmp_path, config, output)
    append(tmp_path / "failures.jsonl", FAILURE)
    view.update([])
    before_any_step = output.getvalue()
    view.close()
    assert "!! first failure of its kind in reward: reward_error: desk:brief" in before_any_step
    for part in ("line 7, in brief", "sample desk/1/0/0/0", "logs/reward.log", "next: ", "show"):
        assert part in before_any_step
    assert output.getvalue().count("!! first failure") == 1


def test_the_log_of_a_tool_that_failed_is_named(tmp_path: Path, config: Config):
    (tmp_path / "logs").mkdir()
    for name in ("rollout", "search"):
        (tmp_path / "logs" / f"{name}.log").touch()
    output = io.StringIO()
    view = TrainingView(tmp_path, config, output)
    reason = "tool_timeout: search: no answer within 30 s"
    append(
        tmp_path / "failures.jsonl",
        FAILURE | {"where": "rollout", "kind": reason, "reason": f"{reason}\n{reason}"},
    )
    view.update([])
    assert output.getvalue().count(reason) == 1  # two calls of one turn, say
    assert "logs/search.log" in output.getvalue()
    assert "rollout.log" not in output.getvalue()
