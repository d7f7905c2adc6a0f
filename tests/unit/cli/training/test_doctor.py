"""`agent-r1 doctor`: one line for each thing, a remedy for each problem, and an exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.cli.main import main
from agent_r1.cli.training.doctor import lines
from agent_r1.config.look import Look
from tests.support.config_scene import load_nothing, write_scene


def states(output: str) -> dict[str, str]:
    """Return the state of each thing, by its name."""
    rows = [line for line in output.splitlines() if not line.startswith(" ")]
    return {row[9:28].strip(): row.split()[0] for row in rows[:-1]}


def test_a_problem_is_followed_by_its_remedy() -> None:
    look = Look("disk", "1 GB free", ["run.dir (/x) has 1 GB; free space, or lower keep_last"])
    assert list(lines(look)) == [
        "problem  disk               1 GB free",
        "         run.dir (/x) has 1 GB",
        "         remedy: free space, or lower keep_last",
    ]


def test_a_note_is_no_problem() -> None:
    (first, *_) = lines(Look("clock", "6 s", notes=["they differ; synchronize them"]))
    assert first.startswith("note")


def test_without_a_configuration_it_says_what_the_machine_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert states(output).keys() == {"software", "GPUs", "disk", "Redis", "sandbox"}
    assert "Python 3." in output
    assert output.endswith("no problems\n")


def test_with_a_configuration_it_makes_the_checks_of_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_nothing(monkeypatch)
    monkeypatch.chdir(tmp_path)
    config = write_scene(tmp_path / "example")
    assert main(["doctor", str(config)]) == 0
    found = states(capsys.readouterr().out)
    assert found.keys() >= {"configuration", "GPUs", "disk", "run token", "Redis", "ports", "tools"}
    assert set(found.values()) == {"ok"}


def test_what_keeps_a_run_from_starting_is_named_where_it_belongs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_nothing(monkeypatch)
    monkeypatch.chdir(tmp_path)
    config = write_scene(tmp_path / "example")
    (tmp_path / "example" / "train.jsonl").unlink()
    options = ["--set", "redis.url=redis://127.0.0.1:1", "--set", 'engine.device="cuda"']
    assert main(["doctor", str(config), *options]) == 2
    output = capsys.readouterr().out
    found = states(output)
    assert {name for name, state in found.items() if state == "problem"} >= {
        "configuration",
        "Redis",
        "GPUs",
    }
    assert "remedy: start Redis there" in output
    # The same words as those of `config check`.
    assert main(["config", "check", str(config), *options]) == 2
    said = capsys.readouterr().err
    assert "redis.url (redis://127.0.0.1:1) does not answer" in said
    assert "redis.url (redis://127.0.0.1:1) does not answer" in output
