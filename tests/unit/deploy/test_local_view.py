"""What the terminal shows of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from agent_r1.config import RunConfig, load_config
from agent_r1_deploy.local_view import (
    Tail,
    TrainingView,
    duration,
    print_result,
    step_line,
    step_table,
    total_steps,
)
from tests.unit.config_scene import write_scene

METRICS = {
    "step": 2,
    "reward/mean": 0.25,
    "reward/exact_match": 0.5,
    "tools/calls_mean": 1.5,
    "throughput/tokens_per_s": 1234.0,
    "queue/depth": 7.0,
    "staleness/max": 1.0,
    "policy/version": 2.0,
    "time/step_s": 3.0,
}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_config(write_scene(tmp_path / "example"), ["learner.steps=10"], {}).config


def append(path: Path, *records: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.6, "1m00s"), (200, "3m20s"), (3720, "1h02m"), (-5, "0s")],
)
def test_durations_are_short(seconds: float, text: str):
    assert duration(seconds) == text


def test_a_step_is_one_line_with_everything_that_matters():
    assert step_line(METRICS, 10, 24.0) == (
        "step 2/10  reward 0.250  EM 0.500  calls 1.50  tokens/s 1,234  queue 7  staleness 1  "
        "policy v2  left 24s"
    )


def test_what_the_learner_does_not_report_is_a_dash():
    assert "EM -" in step_line({"step": 1, "reward/mean": 0.0}, 10, None)


def test_the_table_of_a_long_run_fits_80_columns():
    from rich.console import Console

    long = {**METRICS, "step": 1234, "policy/version": 1234.0, "queue/depth": 1024.0}
    console = Console(file=io.StringIO(), width=80)
    console.print(step_table(long, 10000, 36000.0))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2
    assert "10h00m" in lines[1]


def test_every_step_is_a_line_where_there_is_no_terminal(tmp_path: Path, config: RunConfig):
    output = io.StringIO()
    view = TrainingView(tmp_path, config, output)
    view.update([])
    view.update(["search"])
    view.update(["search"])
    view.update([])
    append(tmp_path / "metrics.jsonl", {**METRICS, "step": 1}, METRICS)
    scores = {"em": 0.4, "n": 200, "mean_searches": 1.25}
    append(
        tmp_path / "evaluations.jsonl", {"step": 0, "name": "before", "sets": {"held_out": scores}}
    )
    view.update([])
    view.event("!! rollout died")
    view.close()
    lines = output.getvalue().splitlines()
    assert lines[:2] == ["starting search", "services are up"]
    assert lines[2] == "evaluation before at step 0: held_out EM 0.400 (n 200, searches 1.25)"
    assert lines[3].startswith("step 1/10 ")
    assert lines[4].endswith("left 24s")  # 8 steps of 3 s
    assert lines[5:] == ["!! rollout died"]


def test_a_resumed_run_shows_only_its_own_steps(tmp_path: Path, config: RunConfig):
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
    tmp_path: Path, config: RunConfig
):
    output = io.StringIO()
    view = TrainingView(tmp_path, config, output)
    view.update(["rollout"])
    view.close()
    assert output.getvalue().splitlines() == ["starting rollout"]


def test_steps_follow_from_epochs_when_none_are_given(config: RunConfig):
    assert total_steps(config) == 10
    learner = config.learner.model_copy(update={"steps": None, "epochs": 6})
    # 2 tasks x 6 epochs / 2 groups a batch
    assert total_steps(config.model_copy(update={"learner": learner})) == 6


def answer(task_id: str, reward: float, text: str) -> dict[str, Any]:
    return {
        "step": 0,
        "group_id": 0,
        "sample_index": 0,
        "task_id": task_id,
        "prompt": [{"role": "user", "content": f"question {task_id}"}],
        "payload": {"answers": ["Oslo"]},
        "status": "COMPLETED",
        "reason": "answer",
        "turns": [{"text": text, "calls": []}],
        "reward": {"total": reward, "components": {}},
        "advantage": None,
        "policy_versions": [0],
        "num_tokens": 5,
        "latency_ms": 1.0,
    }


def test_the_result_shows_an_answer_that_training_changed(tmp_path: Path):
    folder = tmp_path / "run"
    (folder / "trajectories").mkdir(parents=True)
    append(
        folder / "trajectories" / "eval_before.jsonl",
        answer("right", 1.0, "<answer>Oslo</answer>"),
        answer("wrong", 0.0, "<answer>Rome</answer>"),
    )
    append(
        folder / "trajectories" / "eval_after.jsonl",
        answer("right", 1.0, "<answer>Oslo</answer>"),
        answer("wrong", 1.0, "<answer>Oslo</answer>"),
    )
    scores = {"em": 0.4, "n": 200, "mean_searches": 1.0}
    after = {"em": 0.9, "n": 200, "mean_searches": 1.9}
    summary = {
        "steps": 30,
        "trajectories_trained": 240,
        "sampled_tokens": 1000,
        "wall_s": 61.0,
        "em_before": 0.41,
        "em_after": 0.91,
        "sets": {
            "held_out": {"in_domain": True, "before": scores, "after": after},
            "far": {"in_domain": False, "before": scores, "after": None},
        },
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    output = io.StringIO()
    print_result(folder, output)
    text = output.getvalue()
    assert "question wrong" in text
    assert "question right" not in text
    assert text.index("Rome") < text.index("after training") < text.index("<answer>Oslo")
    rows = [line.split() for line in text.splitlines()]
    assert next(row[:7] for row in rows if "held_out" in row) == [
        "│",
        "held_out",
        "│",
        "0.400",
        "│",
        "0.900",
        "│",
    ]
    assert any("0.410" in row and "0.910" in row for row in rows)
    assert "untrained" in text
    assert "30 steps, 240 trajectories" in text
    assert "in 1m01s" in text
    assert f"agent-r1 show {folder}" in text


def test_a_run_without_a_summary_points_to_the_logs(tmp_path: Path):
    output = io.StringIO()
    print_result(tmp_path, output)
    assert "summary.json is missing" in output.getvalue().replace("\n", "")
