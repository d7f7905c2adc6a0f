"""`agent-r1 check`: one line for each thing, a remedy for each problem, verdicts and statuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.cli.main import main
from agent_r1.cli.parser import RENAMED, build_parser
from agent_r1.config import checks as config_checks
from agent_r1.config import code as config_code
from agent_r1.config.code import load_everything
from agent_r1.config.findings import Check
from tests.support.config_scene import load_nothing, write_scene
from tests.support.parsers import parsers
from tests.unit.config.test_code import loaded, probe_here


def states(output: str) -> dict[str, str]:
    """Return the state of each thing, by its name."""
    rows = (line.split(maxsplit=1) for line in output.splitlines() if line[:1].strip())
    return {rest[:18].strip(): state for state, rest in rows if state in ("ok", "note", "problem")}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration that is right, and nothing that takes seconds to load."""
    load_nothing(monkeypatch)
    monkeypatch.chdir(tmp_path)  # where there is no run yet, unlike in a clone that ran the demo
    return write_scene(tmp_path / "example")


def test_a_problem_is_followed_by_its_remedy() -> None:
    look = Check("disk", "1 GB free", ["run.dir (/x) has 1 GB; free space, or lower keep_last"])
    assert list(look.lines()) == [
        "problem  disk               1 GB free",
        "         run.dir (/x) has 1 GB",
        "         remedy: free space, or lower keep_last",
    ]


def test_a_note_is_no_problem() -> None:
    (first, *_) = Check("clock", "6 s", notes=["they differ; synchronize them"]).lines()
    assert first.startswith("note")


def test_without_a_configuration_it_says_what_the_machine_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check"]) == 0
    output = capsys.readouterr().out
    assert states(output).keys() == {"software", "GPUs", "disk", "Redis", "sandbox"}
    assert "Python 3." in output
    assert output.endswith("this machine: ok\n")


@pytest.mark.parametrize("option", [["--elsewhere"], ["--gpu-gb", "80"]])
def test_a_machine_alone_is_this_one(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *option]) == 2
    assert "name a CONFIG" in capsys.readouterr().err


def test_with_a_configuration_it_makes_the_checks_of_train_and_adds_up_the_memory(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(config)]) == 0
    output = capsys.readouterr().out
    found = states(output)
    assert found.keys() >= {"configuration", "GPUs", "disk", "run token", "Redis", "ports", "tools"}
    assert set(found.values()) == {"ok"}
    assert "memory and disk: enough" in output
    assert f"{config}: ok (agent-r1 train)\nthis machine: ok\n" in output


def test_a_wrong_configuration_and_a_machine_that_will_not_do_have_statuses_of_their_own(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--set", "redis.url=redis://127.0.0.1:1", "--set", 'engine.device="cuda"']
    assert main(["check", str(config), *options]) == 1
    output = capsys.readouterr().out
    found = states(output)
    assert {name for name, state in found.items() if state == "problem"} >= {"Redis", "GPUs"}
    assert "redis.url (redis://127.0.0.1:1) does not answer" in output
    assert "remedy: start Redis there" in output
    assert f"{config}: ok (agent-r1 train)\nthis machine: it does not fit: 2 problems" in output
    assert main(["check", str(config), *options, "--elsewhere"]) == 0
    assert "this machine: skipped (--elsewhere)" in capsys.readouterr().out

    (config.parent / "corpus.jsonl").unlink()
    for more in ([], ["--elsewhere"], ["--gpu-gb", "80"]):
        assert main(["check", str(config), *options, *more]) == 2
        output = capsys.readouterr().out
        assert "tools.search.corpus" in output
        assert f"{config}: the configuration is wrong: 1 problem\n" in output


def test_gpus_of_another_machine_are_judged_before_the_data_is_there(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "train.jsonl").unlink()
    assert main(["check", str(config), "--gpu-gb", "80"]) == 2
    output = capsys.readouterr().out
    assert "memory and disk: enough" in output
    assert "a machine with GPUs of 80 GB: ok" in output
    assert states(output).keys() == {"configuration"}


def test_a_shortage_of_memory_is_judged_once(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sum of all processes, not by the engine's own check before it."""
    monkeypatch.setattr(config_checks, "load_everything", load_everything)
    monkeypatch.setattr(config_code, "_run", probe_here)
    options = ["--set", "rollout.kv_cache_gib=500000", "--set", "engine.device=cpu"]
    assert main(["check", str(config), *options]) == 1
    output = capsys.readouterr().out
    assert output.count("are free") == 1
    assert set(states(output).values()) == {"ok"}
    assert "this machine: it does not fit: 1 problem\n" in output


def test_the_remedy_of_a_shortage_is_all_of_it(config: Path) -> None:
    """Where nothing is summed up: the first words say what is short, the rest what to lower."""
    findings = loaded(config.parent, "rollout.kv_cache_gib=500000", model=True, machine=True)
    (look,) = (one for one in findings.checks if one.problems)
    _, what, remedy = look.lines()
    assert "exceed the free memory" in what
    assert remedy.strip().startswith("remedy: lower, in this order: rollout.max_concurrent, ")


def test_what_does_not_fit_is_no_fault_of_the_configuration(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(config), "--gpu-gb", "1"]) == 1
    output = capsys.readouterr().out
    assert f"{config}: ok (agent-r1 train)\na machine with GPUs of 1 GB: it does not fit" in output


def test_a_model_whose_size_cannot_be_read_is_a_problem_of_the_configuration(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config.parent / "model" / "config.json"
    file.unlink()  # a link to the committed model's
    file.write_text("null")
    assert main(["check", str(config)]) == 2
    assert f"{file} is no JSON" in capsys.readouterr().out


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_an_old_command_only_names_the_new_one(
    old: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*old.split(), "--help"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"agent-r1: error: this command is now `agent-r1 {RENAMED[old]}`\n"
    words = {"RUN": "run", "CONFIG": "run.toml", "ID": "1-0"}
    build_parser().parse_args([words.get(word, word) for word in RENAMED[old].split()])


def test_there_are_at_most_34_commands() -> None:
    groups = {"config", "search", "tools", "agents", "rollout", "reward", "ray", "dead-letters"}
    names = [parser.prog.split()[1:] for parser in parsers(build_parser())]
    assert len([name for name in names if name and " ".join(name) not in groups]) == 34
