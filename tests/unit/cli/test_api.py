"""`agent_r1.train`: the command's configuration, errors and results, from Python."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

import agent_r1
from agent_r1.config.run import Config, write_config
from tests.support.config_scene import RUN_TOML, write_scene


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, bool]]:
    """Note what would be trained, and leave a summary where the status says that it has ended."""
    runs: list[tuple[Config, bool]] = []

    def run_training(config: Config, *, resume: bool) -> int:
        runs.append((config, resume))
        folder = config.run.folder()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text(json.dumps({"status": "finished"}))
        write_config(config, folder / "config.json")
        return {"failed": 1, "stopped": 130}.get(config.run.id, 0)

    monkeypatch.setattr("agent_r1.launch.local.run_training", run_training)
    return runs


def test_a_file_or_its_tables_are_trained_and_the_summary_returned(
    started: list[tuple[Config, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = write_scene(tmp_path / "scene")
    monkeypatch.chdir(file.parent)
    assert agent_r1.train(file, options=["learner.steps=7"]) == {"status": "finished"}
    agent_r1.train(tomllib.loads(RUN_TOML), options=["learner.steps=7"])
    (of_file, resumes), (of_tables, _) = started
    assert not resumes
    assert of_tables == of_file
    assert of_file.learner.steps == 7


def test_a_run_is_resumed_from_its_folder(started: list[tuple[Config, bool]], tmp_path: Path):
    agent_r1.train(write_scene(tmp_path / "scene"), options=[f"run.dir={tmp_path / 'run'}"])
    agent_r1.train(resume=tmp_path / "run", options=["learner.steps=9"])
    config, resumes = started[-1]
    assert resumes
    assert config.learner.steps == 9


def test_errors_are_those_of_the_command(tmp_path: Path):
    file = write_scene(tmp_path / "scene")
    with pytest.raises(ValueError, match="unknown key 'stepz' in table"):
        agent_r1.train(file, options=["learner.stepz=3"])
    with pytest.raises(ValueError, match="unknown key 'num_generations' in table"):
        agent_r1.train({"learner": {"num_generations": 3}})
    with pytest.raises(ValueError, match="no configuration file"):
        agent_r1.train(tmp_path / "gone.toml")
    with pytest.raises(ValueError, match="or resume=DIR"):
        agent_r1.train()


def test_a_run_that_does_not_finish_raises(started: list[tuple[Config, bool]], tmp_path: Path):
    file = write_scene(tmp_path / "scene")
    place = f"run.dir={tmp_path / 'run'}"
    with pytest.raises(agent_r1.RunStoppedError, match="stopped; its logs are in"):
        agent_r1.train(file, options=["run.id=failed", place])
    with pytest.raises(KeyboardInterrupt):
        agent_r1.train(file, options=["run.id=stopped", place])
    assert len(started) == 2
