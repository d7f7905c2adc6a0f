"""`agent-r1 estimate` and the sums of `agent-r1 train --dry-run`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from agent_r1.cli.main import main
from agent_r1.cli.training.dry_run import (
    Measured,
    Plan,
    disk,
    dry_run,
    hours,
    plan_of,
    prediction,
    shortened,
)
from agent_r1.cli.training.estimate import Machine, changed, make_fit, sum_up
from agent_r1.config.estimate import ModelSize
from agent_r1.config.run import Config, load_config
from agent_r1_service.exit_status import EXIT_FAILED, EXIT_INTERRUPTED
from tests.support.config_scene import write_scene

SIZE = ModelSize(
    weights=50_000_000,
    layers=8,
    hidden=512,
    intermediate=1408,
    heads=8,
    queries=512,
    keys=128,
    vocabulary=8000,
    tied=False,
)
LARGE = Machine(gpu_bytes=None, memory_bytes=1e12, disk_bytes=1e12)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    options = ["learner.max_tokens_per_microbatch=16384", "learner.groups_per_batch=64"]
    return load_config(write_scene(tmp_path / "example"), options, {}).config


def test_a_run_that_fits_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_scene(tmp_path / "example")
    assert main(["estimate", str(file), "--set", "learner.device=cpu"]) == 0
    printed = capsys.readouterr().out
    assert "model: 0.7M weights, " in printed
    for title in ("learner, 1 rank on the CPU", "rollout, 1 server on", "disk", "it fits"):
        assert title in printed


def test_figures_for_gpus_say_that_they_are_unverified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write_scene(tmp_path / "example")
    assert main(["estimate", str(file), "--gpu-gb", "80"]) == 0
    assert "figures for GPUs are unverified" in capsys.readouterr().out


def test_what_does_not_fit_is_said_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = write_scene(tmp_path / "example")
    assert main(["estimate", str(file), "--gpu-gb", "1"]) == 1
    printed = capsys.readouterr().out
    assert "!! learner: " in printed
    assert "on a GPU of 1.00 GB" in printed
    assert "no key makes it fit" in printed


def test_the_key_that_makes_it_fit_is_named_alone(config: Config):
    assert sum_up(config, SIZE, None, LARGE).problems == []
    fewer = changed(config, [("learner", "max_tokens_per_microbatch", 4096)])

    def need(one: Config) -> float:
        found = sum_up(one, SIZE, None, replace(LARGE, memory_bytes=0))
        (problem,) = found.problems
        return float(problem.partition("memory: ")[2].partition(" GB")[0])

    machine = replace(LARGE, memory_bytes=(need(fewer) + 0.1) * 1e9)
    changes = make_fit(config, lambda c: not sum_up(c, SIZE, None, machine).problems, machine)
    assert changes == [("learner", "max_tokens_per_microbatch", 4096)]


def test_a_gpu_that_is_too_small_gives_its_optimizer_to_the_machine(config: Config):
    # 100M weights in bfloat16 take 0.2 GB, their gradients 0.6, the optimizer 1.2, and CUDA 4: 6.0
    # in all, and 4.8 without the optimizer, beside activations.
    size = replace(SIZE, weights=100_000_000, intermediate=16, vocabulary=32)
    table = config.model_copy(
        update={"model": config.model.model_copy(update={"dtype": "bfloat16"})}
    )
    machine = replace(LARGE, gpu_bytes=5.5e9)
    table = changed(table, [("rollout", "gpu_memory_utilization", 1.0)])
    changes = make_fit(table, lambda c: not sum_up(c, size, None, machine).problems, machine)
    assert changes is not None
    assert ("learner", "offload", "optimizer") in changes
    assert [change for change in changes if change[1] == "ranks"] == []


def test_too_small_a_disk_keeps_fewer_checkpoints(config: Config):
    # 50M weights: a checkpoint is 0.8 GB, a version 0.2 GB. 4 and 3 of them are 3.8 GB, 2 and 3
    # are 2.2 GB.
    machine = replace(LARGE, disk_bytes=2.5e9)
    (problem,) = sum_up(config, SIZE, None, machine).problems
    assert problem == "disk: 3.80 GB are needed, and 2.50 GB are free"
    changes = make_fit(config, lambda c: not sum_up(c, SIZE, None, machine).problems, machine)
    assert changes == [("learner", "keep_best", 0), ("learner", "keep_last", 1)]


MEASURED = Measured(
    step_s=3.0, rollout_s=2.0, checkpoint_bytes=100, weights_bytes=50, trajectory_bytes=7
)
PLAN = Plan(steps=1000, evaluations=3, questions=40, samples_per_step=8, checkpoints=4)


def test_time_and_disk_are_those_of_the_steps():
    # 1000 x 3 s; 3 x 40 questions of 2 / 8 s each.
    assert hours(PLAN, MEASURED) == (3000.0, 30.0)
    # 4 x 100 + 50 + 1000 x 7
    assert disk(PLAN, MEASURED) == 7450


def test_the_plan_is_the_whole_runs_and_the_dry_run_two_steps(config: Config, tmp_path: Path):
    assert plan_of(config).steps == 3
    short = shortened(config, tmp_path / "dry")
    assert (short.learner.steps, short.evaluation.before) == (2, False)
    assert short.run.folder() == tmp_path / "dry"
    lines = list(prediction(config, PLAN, MEASURED))
    assert lines[0] == "a step takes 3.00 s, a checkpoint 0.00 MB"
    assert "1000 steps will take about" in lines[1]


@pytest.mark.parametrize(("status", "stays"), [(EXIT_INTERRUPTED, False), (EXIT_FAILED, True)])
def test_a_dry_run_that_stops_keeps_its_folder_for_the_cause_alone(
    config: Config, monkeypatch: pytest.MonkeyPatch, status: int, stays: bool
):
    folders: list[Path] = []

    def run_training(config: Config, *, resume: bool, temporary: bool) -> int:
        assert temporary
        folders.append(config.run.folder())
        folders[0].mkdir()
        (folders[0] / "metrics.jsonl").write_text('{"step": 1}\n')
        return status

    monkeypatch.setattr("agent_r1_deploy.local.run_training", run_training)
    assert dry_run(config) == status
    assert folders[0].exists() == stays
    shutil.rmtree(folders[0].parent, ignore_errors=True)


def test_a_dry_run_of_a_resumed_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_scene(tmp_path / "example")
    assert main(["train", str(file), "--dry-run", "--resume", str(tmp_path)]) == 2
    assert "--resume" in capsys.readouterr().err
