"""What a configuration names outside itself: models, data, corpora, code, memory, ports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agent_r1.config import checks as config_checks
from agent_r1.config import machine as config_machine
from agent_r1.config.run import Config, ConfigError, load_config
from agent_r1.learner.redis_memory import worst_case_redis_bytes
from agent_r1.runtime.files.hub import HubError
from tests.support.config_scene import run_spec, task_line, write_scene


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # without a run, unlike a clone that ran the demo
    return write_scene(tmp_path / "example").parent


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")


def load(folder: Path, *options: str) -> Config:
    return load_config(folder / "run.toml", options, {}).config


def problems(folder: Path, *options: str, purpose: config_machine.Purpose = "train") -> str:
    return "\n".join(config_checks.problems(load(folder, *options), purpose))


def test_a_complete_configuration_has_no_problems(folder: Path):
    assert problems(folder) == ""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["model.path=./nowhere"], "is not a folder; name a Hugging Face model directory"),
        (
            ["reward.components.critic=1.0", 'reward.servers.critic={path = "./no", model = "m"}'],
            "reward.servers.critic.path (",
        ),
        (["data.train=['nowhere.jsonl']"], "data.train: "),
        (["tools.search.corpus=nowhere.jsonl"], "tools.search.corpus ("),
        (["evaluation.sets.x=nowhere.jsonl"], "evaluation.sets.x: "),
        (["run.plugins=['no-such-package-here']"], "neither a folder nor an installed package"),
        (["learner.loggers=['mlflow']"], "`pip install 'agent-r1[mlflow]'`"),
        (["run.plugins=['pydantic>=99']"], "not what is installed here (pydantic 2."),
        (["run.plugins=['pydantic>=99']"], "`pip install 'pydantic>=99'`"),
    ],
)
def test_what_is_missing_is_named(folder: Path, options: list[str], expected: str):
    assert expected in problems(folder, *options)


def test_the_first_task_of_each_kind_of_dialogue_is_kept(folder: Path):
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    lines = [
        task_line("a"),
        task_line("b"),
        task_line("c", prompt=said),
        task_line("d", tools=[]),
        task_line("e", prompt=said),
    ]
    (folder / "train.jsonl").write_text("".join(lines))
    kinds: config_checks.Kinds = {}
    assert config_checks.problems(load(folder), "train", kinds) == []
    found = [(where.rpartition("/")[2], task.id) for where, task in kinds.values()]
    assert found == [("train.jsonl:1", "a"), ("train.jsonl:3", "c"), ("train.jsonl:4", "d")]


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("generate.py", "generate.py --out {0}/data --no-sft`"),
        ("convert.py", "convert.py repacked --data FOLDER --out {0}/data`"),
        ("prepare.py", "prepare.py KIND --source FILE --out {0}/data/x.jsonl`"),
    ],
)
def test_the_command_that_makes_the_missing_data_of_an_example_is_named(
    folder: Path, script: str, command: str
):
    options = ["data.train=['data/x.jsonl']", "tools.search.corpus=data/x.jsonl"]
    where = [option.replace("data/x", f"{folder}/data/x") for option in options]
    assert "make it with" not in problems(folder, *where)
    (folder / script).touch()
    assert problems(folder, *where).count(f"python {folder}/{command.format(folder)}") == 2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer*.json", "has no tokenizer"),
    ],
)
def test_an_incomplete_model_is_explained(folder: Path, name: str, expected: str):
    for file in list((folder / "model").glob(name)):
        file.unlink()
    assert expected in problems(folder)


def test_a_hub_name_is_refused_where_the_hub_is_forbidden(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    assert "HF_HUB_OFFLINE=1 forbids" in problems(folder, "model.path=owner/name")
    (folder / "cache" / "hub" / "models--owner--name").mkdir(parents=True)
    assert problems(folder, "model.path=owner/name") == ""


def test_a_malformed_line_is_named_by_file_and_number(folder: Path):
    (folder / "train.jsonl").write_text(task_line("a") + '{"id": "b"}\n')
    assert "train.jsonl:2: prompt: Field required" in problems(folder)


def test_a_task_with_an_image_is_named_by_file_and_number(folder: Path):
    image = {"type": "image", "media_type": "image/png", "sha256": "0" * 64}
    line = task_line("b", prompt=[{"role": "user", "content": [image]}])
    (folder / "train.jsonl").write_text(task_line("a") + line)
    assert "train.jsonl:2: an image (image/png) cannot be shown to the policy" in problems(folder)


@pytest.mark.parametrize("reward", ["{}", "{rule='paper'}", "{components={math_equal=1.0}}"])
@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ({}, "payload has answers = None"),
        ({"answers": []}, "payload has answers = []"),
        ({"answers": [72]}, "payload has answers = [72]; every answer must be a text"),
    ],
)
def test_a_task_that_the_reward_cannot_score_is_named_once(
    folder: Path, reward: str, payload: dict[str, Any], problem: str
):
    lines = task_line("a") + task_line("b", payload=payload) + task_line("c", payload=payload)
    (folder / "train.jsonl").write_text(lines)
    found = problems(folder, f"reward={reward}")
    compared = "math_equal" if "math" in reward else "exact_match"
    assert f"train.jsonl:2: {compared} cannot score task 'b': {problem}" in found
    assert found.count("payload has answers") == 1
    assert "let reward.components name" in found
    assert problems(folder, "reward.components={answered = 1.0}") == ""


def test_a_task_that_asks_for_an_unknown_tool_is_named(folder: Path):
    (folder / "train.jsonl").write_text(task_line("a", tools=["serch"]))
    assert "task 'a' asks for the tool 'serch'; the model is offered ['search']" in problems(folder)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "runs/demoo",
            "is not a folder; did you mean runs/demo? Otherwise name a Hugging Face model",
        ),
        ("runs/other", "(runs/other) is not a folder; name a Hugging Face model directory"),
        (
            "TYPO",
            "(TYPO) is not a folder; name a Hugging Face model directory or a model on the hub",
        ),
        ("exampel", "is not a folder; did you mean example? Otherwise"),
        ("a/b/c", "is not a folder; name a Hugging Face model directory"),
    ],
)
def test_what_can_be_no_model_is_refused_without_asking_a_hub(
    path: str, expected: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder.parent)
    (folder.parent / "runs" / "demo").mkdir(parents=True)
    assert expected in (config_checks.check_model(path) or "")


def test_a_hub_that_does_not_have_the_model_is_a_fault_of_this_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))

    def refuse(name: str, revision: str | None, *, small: bool) -> Path:
        raise HubError(f"the hub has no {name}")

    monkeypatch.setattr("agent_r1.config.checks.model_folder", refuse)
    here = config_checks.find(load(folder, "model.path=owner/name"), "train")
    assert (here.problems, here.machine) == ([], ["the hub has no owner/name"])
    elsewhere = config_checks.find(load(folder, "model.path=owner/name"), "train", machine=False)
    assert (elsewhere.problems, elsewhere.machine) == ([], [])
    assert "model.path (owner/name) was not checked" in elsewhere.notes[0]


def test_a_reward_model_has_no_adapter(folder: Path):
    options = ["model.lora.rank=8", "train_reward.trajectories=['run']", "train_reward.output=out"]
    assert "[model.lora] and [train_reward] cannot be combined" in problems(
        folder, *options, purpose="train_reward"
    )


def test_purposes_need_different_tables(folder: Path):
    bare = '[model]\npath = "model"\nmax_context = 512\n[env]\nmax_tokens_per_turn = 64\n'
    (folder / "run.toml").write_text(bare)
    assert "table [data] is missing" in problems(folder)
    assert "evaluation.sets is empty" in problems(folder, purpose="evaluate")
    assert "table [sft] is missing" in problems(folder, purpose="sft")
    assert problems(folder, purpose="serve") == ""


def test_the_worst_case_in_flight_must_fit_the_memory_of_redis(folder: Path):
    # (1 + 1) x 64 x 32 trajectories of training, and 512 of evaluation
    wanted = (2 * 64 * 32 + 512) * (16_384 + 20 * 512)  # samples and questions, bytes of each
    options = [
        "learner.max_staleness=1",
        "learner.groups_per_batch=64",
        "learner.group_size=32",
    ]
    config = load(folder, *options)
    of_run = config.learner, config.evaluation, config.model.max_context
    assert worst_case_redis_bytes(*of_run) == wanted
    assert problems(folder, *options, "redis.maxmemory_mb=128") == ""
    text = problems(folder, *options, "redis.maxmemory_mb=64")
    assert text.startswith("redis.maxmemory_mb (64 MiB) must hold the worst case in flight")
    assert "learner.groups_per_batch 64" in text
    # Each of the 5 turns may be a segment of its own, as long as the context.
    segments = 'env.rewritten_history="segments"'
    config = load(folder, *options, segments)
    of_run = config.learner, config.evaluation, config.model.max_context, config.max_segments
    assert worst_case_redis_bytes(*of_run) == (2 * 64 * 32 + 512) * (16_384 + 20 * 512 * 5)
    text = problems(folder, *options, segments, "redis.maxmemory_mb=128")
    assert "model.max_context) of model.max_context 512 tokens" in text


def test_the_learner_asks_for_the_memory_that_the_check_before_the_run_asked_for(folder: Path):
    # The one question of the set counts as the 512 that may be in flight, as it does in the check.
    config = load(folder, 'redis.url="redis://127.0.0.1:1/0"')
    spec = run_spec(config)
    need = worst_case_redis_bytes(config.learner, config.evaluation, config.model.max_context)
    spec.check_memory(None)
    spec.check_memory(need)
    with pytest.raises(ValueError, match="must hold the worst case in flight"):
        spec.check_memory(need - 1)


def test_check_lists_every_problem_and_those_of_the_machine_apart(folder: Path):
    (folder / "corpus.jsonl").unlink()
    (folder / "model" / "config.json").unlink()
    (folder / "file").write_text("")
    config = load(folder, f"run.dir={folder}/file/run", "env.type=nomodule:Env")
    with pytest.raises(ConfigError) as caught:
        config_checks.check(config, "train")
    model, corpus, env, section, run_dir = str(caught.value).splitlines()
    assert "has no config.json" in model
    assert "tools.search.corpus" in corpus
    assert "env.type (nomodule:Env)" in env
    assert section == "on this machine (skipped by `agent-r1 check --elsewhere`):"
    assert f"  run.dir ({folder}/file/run) cannot be created: {folder}/file is a file" in run_dir
    with pytest.raises(ConfigError) as caught:
        config_checks.check(config, "train", machine=False)
    assert str(caught.value).splitlines() == [model, corpus, env]
