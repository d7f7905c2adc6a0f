"""`agent-r1 init`: a folder that holds a whole task, and nothing is overwritten."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from agent_r1.cli.main import main
from agent_r1.config.run import load_config
from agent_r1.runtime.files.tasks import read_task_file


def test_the_folder_has_twenty_tasks_and_everything_that_its_configuration_names(tmp_path: Path):
    folder = tmp_path / "my_task"
    assert main(["init", str(folder)]) == 0
    config = load_config(folder / "run.toml", [], {}).config
    assert config.data is not None
    files = [*config.data.train, *config.evaluation.sets.values()]
    tasks = [task for file in files for task in read_task_file(file)]
    assert len({str(task.prompt) for task in tasks}) == 20
    assert config.run.plugins == [str(folder)]
    assert config.model.path == str(folder / "base")
    assert (folder / "base" / "model.safetensors").is_file()
    assert {path.name for path in folder.iterdir()} == {
        *("README.md", "run.toml", "task.py", "test_task.py", "pytest.ini"),
        *("base", "data", "episodes"),
    }


def test_an_empty_folder_is_filled(tmp_path: Path):
    assert main(["init", str(tmp_path)]) == 0
    assert (tmp_path / "run.toml").is_file()


@pytest.mark.parametrize("example", ["starter", "tiny_world"])
def test_a_folder_that_holds_anything_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], example: str
):
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["init", str(tmp_path), "--example", example]) == 2
    assert "is not empty; nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_file_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "taken").write_text("mine")
    assert main(["init", str(tmp_path / "taken")]) == 2
    assert "is a file; name a folder" in capsys.readouterr().err


def test_the_commands_can_be_pasted_whatever_is_in_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "my task; $HOME"
    assert main(["init", str(folder)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  cd ")]
    assert shlex.split(line) == ["cd", str(folder)]


def test_an_agent_is_written_beside_the_run_that_trains_it(tmp_path: Path):
    folder = tmp_path / "mine"
    assert main(["init", str(folder), "--agent"]) == 0
    config = load_config(folder / "agent.toml").config
    assert config.agent is not None
    assert config.agent.command is not None
    assert [Path(word).is_file() for word in config.agent.command] == [True, True]
    assert config.agent.answer == "output"
    assert "agent-r1 train agent.toml" in (folder / "README.md").read_text()
    assert config.data is not None
    assert "search" in config.tools
