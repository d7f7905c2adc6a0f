"""`agent-r1 export`: which checkpoint, what stands beside the model, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_r1.cli.main import main
from agent_r1.cli.results.export import choose_step
from agent_r1.config.run import load_config, write_config
from agent_r1.runtime.files.writing import seal
from tests.support.config_scene import write_scene

GENERATION = {"eos_token_id": 7, "temperature": 0.7, "repetition_penalty": 1.05, "do_sample": True}
STATE: dict[str, Any] = {"step": 4}


def make_checkpoint(run: Path, step: int) -> Path:
    folder = run / "checkpoints" / f"step_{step:06d}"
    (folder / "model").mkdir(parents=True)
    (folder / "engine").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_bytes(bytes([step]) * 10)
    (folder / "model" / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "engine" / "policy.safetensors").write_bytes(b"state")
    seal(folder)
    write_state(folder, step)
    return folder


def write_state(folder: Path, step: int) -> None:
    # As the learner does: its digest is part of it.
    from agent_r1.learner.checkpoints.run_checkpoint import LearnerState, sealed_state

    (folder / "learner.json").write_text(sealed_state(LearnerState(step=step)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with three checkpoints, of which the second has the best score."""
    file = write_scene(tmp_path / "example")
    options = ['env.system_prompt="Be brief."', "env.max_turns=3", "evaluation.temperature=0.5"]
    config = load_config(file, options, {}).config
    folder = tmp_path / "run"
    folder.mkdir()
    write_config(config, folder / "config.json")
    for step in (2, 4, 6):
        make_checkpoint(folder, step)
    scores = {"2": 0.1, "4": 0.5, "6": 0.3}
    (folder / "checkpoints" / "scores.json").write_text(json.dumps(scores))
    lines = [
        evaluation(0, "before", 0.125),
        evaluation(4, "during", 0.5),
        evaluation(6, "after", 0.25),
    ]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def evaluation(step: int, name: str, reward: float) -> dict[str, Any]:
    sets = {"held_out": {"n": 8, "reward": reward, "components": {"exact_match": reward}}}
    return {"step": step, "name": name, "sets": sets}


def exported(run: Path, out: Path, *options: str) -> dict[str, Any]:
    assert main(["export", str(run), str(out), *options]) == 0
    return json.loads((out / "agent.json").read_text())


@pytest.mark.parametrize(
    ("options", "step"),
    [((), 6), (("--step", "last"), 6), (("--step", "best"), 4), (("--step", "2"), 2)],
)
def test_the_checkpoint_that_is_asked_for_is_written(
    run: Path, tmp_path: Path, options: tuple[str, ...], step: int
):
    out = tmp_path / "out"
    exported(run, out, *options)
    assert (out / "model.safetensors").read_bytes() == bytes([step]) * 10
    assert not (out / "engine").exists()


def test_agent_json_has_what_a_program_needs_to_ask_as_the_run_did(run: Path, tmp_path: Path):
    agent = exported(run, tmp_path / "out")
    assert agent["system_prompt"] == "Be brief."
    assert [tool["function"]["name"] for tool in agent["tools"]] == ["search"]
    assert agent["tools"][0]["function"]["parameters"]["required"] == ["query"]
    assert (agent["tool_format"], agent["tool_call_parser"]) == ("hermes", "hermes")
    assert agent["sampling"]["temperature"] == 0.5
    assert agent["limits"]["max_turns"] == 3


def test_servers_sample_as_the_run_did_and_not_as_the_base_model_asks(run: Path, tmp_path: Path):
    exported(run, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert found == {
        "eos_token_id": 7,
        "do_sample": True,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
    }


def test_the_card_shows_scores_and_no_path_of_this_machine(run: Path, tmp_path: Path):
    exported(run, tmp_path / "out", "--step", "best")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| held_out | 8 | reward | 0.125 | 0.500 |" in card
    assert str(tmp_path) not in card
    assert '"max_turns": 3' in card


@pytest.mark.parametrize(
    ("cpu_build", "program"),
    [("", "vllm serve"), ("0.32.0", "python -m vllm.entrypoints.openai.api_server --model")],
)
def test_the_command_that_serves_it_here_is_printed(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cpu_build: str,
    program: str,
):
    monkeypatch.setattr("agent_r1.cli.results.export.installed_version", lambda name: cpu_build)
    exported(run, tmp_path / "out")
    printed = capsys.readouterr().out
    assert f"serve it: {program} {tmp_path}/out --dtype" in printed
    assert "--enable-auto-tool-choice --tool-call-parser hermes" in printed
    # Else a CPU server wants 92 % of the machine's memory; the run's own cache had 1 GiB.
    assert ("--kv-cache-memory-bytes 1073741824" in printed) == bool(cpu_build)


@pytest.mark.parametrize("wanted", ["3", "0x2", "newest"])
def test_a_step_without_a_checkpoint_is_refused(
    run: Path, tmp_path: Path, wanted: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["export", str(run), str(tmp_path / "out"), "--step", wanted]) == 2
    assert "its checkpoints are of the steps 2, 4, 6" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_used_folder_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


def test_a_damaged_checkpoint_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    weights = run / "checkpoints" / "step_000006" / "model" / "model.safetensors"
    weights.write_bytes(b"x" * 10)
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    assert f"{weights} is corrupted" in capsys.readouterr().err


def test_without_checkpoints_or_scores_the_reason_is_said(run: Path, tmp_path: Path):
    (run / "checkpoints" / "scores.json").unlink()
    with pytest.raises(ValueError, match="was evaluated; its checkpoints are of the steps 2, 4, 6"):
        choose_step(run / "checkpoints", "best")
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        choose_step(tmp_path / "elsewhere" / "checkpoints", "last")


def test_train_from_a_run_or_model_sets_the_model(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", "--resume", str(run), "--from", str(run)]) == 2
    assert "--from and --resume cannot be combined" in capsys.readouterr().err
    file = tmp_path / "example" / "run.toml"
    assert main(["train", str(file), "--from", str(tmp_path / "nothing")]) == 2
    assert "MODEL_OR_RUN" in capsys.readouterr().err


def test_a_run_without_a_critic_exports_none(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["export", str(run), str(tmp_path / "out"), "--critic"]) == 2
    said = capsys.readouterr().err
    assert "no critic: learner.advantage is 'grpo'" in said
    assert 'learner.algorithm = "ppo"' in said
    assert not (tmp_path / "out").exists()


def test_a_critic_in_files_of_every_rank_is_not_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = json.loads((run / "config.json").read_text())
    config["learner"] |= {"algorithm": "ppo", "advantage": "gae"}
    (run / "config.json").write_text(json.dumps(config))
    assert main(["export", str(run), str(tmp_path / "out"), "--critic"]) == 2
    assert "resume the run, and export its next checkpoint" in capsys.readouterr().err


def test_a_critic_that_has_learned_the_beginnings_of_turns_alone_is_not_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = json.loads((run / "config.json").read_text())
    config["learner"] |= {"algorithm": "turn_ppo", "advantage": "turn_gae"}
    (run / "config.json").write_text(json.dumps(config))
    assert main(["export", str(run), str(tmp_path / "out"), "--critic"]) == 2
    said = capsys.readouterr().err
    assert "learned only the states in which turns begin (learner.advantage = 'turn_gae')" in said
    assert 'name a run of learner.algorithm = "ppo"' in said
    assert not (tmp_path / "out").exists()
