"""`agent-r1 try --policy none` with real tools and reward, on the folder that init writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agent_r1.cli.main import main
from tests.support.hub_server import serving_hub
from tests.support.runs import finished
from tests.support.starter import write_starter

pytestmark = [pytest.mark.redis, pytest.mark.timeout(240)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_starter(tmp_path, monkeypatch)


def validate(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["try", str(folder / "run.toml"), "--policy", "none", *options])
    return code, " ".join(capsys.readouterr().out.split())


def test_the_written_task_is_sound(folder: Path, capsys: pytest.CaptureFixture[str]):
    # A machine without these GPUs can say all the same whether the task is sound.
    gpus = ["rollout.tensor_parallel_size=2", "engine.ranks=4", "placement.rollout=[[0,1]]"]
    options = [word for key in gpus for word in ("--set", key)]
    code, text = validate(folder, capsys, *options)
    assert code == 0, text
    for line in (
        "ok tasks 14 to train on, 6 to evaluate with",
        "ok tools.search version 1: search(query)",
        "ok reward task:correct",
        "ok rewards passing 1 > failing 0",
        "no problems",
    ):
        assert line in text
    assert "(search ok, search ok)" in text  # the passing episode asks the real tool twice


def test_each_thing_that_is_wrong_is_named_with_its_line_and_its_remedy(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    train = folder / "data" / "train.jsonl"
    lines = train.read_text().splitlines()
    lines[1] = json.dumps({"id": "no-answer", "prompt": "Where?", "payload": {}})
    lines[2] = json.dumps({"id": "long", "prompt": "a " * 600, "payload": {"answer": "Rome"}})
    held_out = (folder / "data" / "evaluation.jsonl").read_text().splitlines()
    lines[3] = held_out[4]
    train.write_text("\n".join(lines) + "\n")
    failing = folder / "episodes" / "failing.json"
    failing.write_text((folder / "episodes" / "passing.json").read_text())
    code, text = validate(folder, capsys)
    assert code == 1
    assert "evaluation.jsonl:5 (task 'evaluation-05') leaks: " in text
    assert "train.jsonl:2 (task 'no-answer'): an empty answer cannot be scored" in text
    assert "raised KeyError: 'answer'" in text
    # "a " is 2 tokens or more, 600 of them; the context has 512.
    assert "train.jsonl:3 (task 'long'): the prompt has" in text
    assert "model.max_context is 512" in text
    assert "the passing episode earns 1 and the failing one 1" in text
    assert "4 problems" in text


def test_a_line_that_is_no_task_ends_the_check_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    with (folder / "data" / "train.jsonl").open("a") as file:
        file.write('{"id": "x"}\n')
    code, text = validate(folder, capsys)
    assert code == 1
    assert "train.jsonl:15: prompt: Field required" in text
    assert "tools.search version" not in text


def test_the_weights_of_a_model_on_a_hub_stay_there(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    with serving_hub("owner/tiny", folder / "base") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        said = finished(
            *("try", folder / "run.toml", "--policy", "none", "--set", "model.path=owner/tiny")
        )
    assert "no problems" in said
    assert [one for one in hub.requests if one.startswith("GET") and "tokenizer.json" in one] != []
    assert hub.sent_bytes == 0  # of the weights


def test_a_tool_that_always_raises_is_found(folder: Path, capsys: pytest.CaptureFixture[str]):
    task = folder / "task.py"
    text = task.read_text()
    task.write_text(text.replace("wanted = words(", "wanted = word("))
    code, said = validate(folder, capsys)
    assert code == 1
    assert "every call of tools.search ended in an error (\"Error: NameError: name 'word'" in said
    assert "1 problem" in said
