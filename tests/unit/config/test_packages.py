"""An environment without what `agent-r1 setup` installs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from agent_r1.cli.main import main
from agent_r1.config.packages import missing_packages_problem
from tests.support.config_scene import write_scene

REMEDY = "run `agent-r1 setup cpu`"


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with neither vLLM nor MCP."""
    find = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        return None if name in ("mcp", "vllm") else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    "command",
    [
        ["train"],
        ["try"],
        ["try", "--policy", "none"],
        ["evaluate", "--policy", "model", "--out", "x"],
    ],
)
def test_a_command_names_what_is_missing_and_the_command_that_installs_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
):
    file = write_scene(tmp_path / "example")
    monkeypatch.chdir(file.parent)
    assert main([command[0], str(file), *command[1:]]) == 2
    error = capsys.readouterr().err
    assert "mcp" in error.partition(": not installed")[0]
    assert REMEDY in error


@pytest.mark.usefixtures("bare")
def test_the_warm_start_needs_neither():
    assert missing_packages_problem(("torch", "deepspeed")) is None


@pytest.mark.usefixtures("bare")
def test_check_counts_it_as_a_problem(capsys: pytest.CaptureFixture[str]):
    assert main(["check"]) == 1
    assert "mcp, vllm: not installed in this environment" in capsys.readouterr().out
