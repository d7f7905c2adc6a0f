"""What a configuration names outside itself: models, data, corpora, code, memory, ports."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from agent_r1 import config_checks
from agent_r1.config import ConfigError, RunConfig, load_config
from agent_r1_proto.config import ListenTable
from agent_r1_proto.streams import worst_case_bytes
from tests.unit.config_scene import RUN_TOML, task_line, write_scene


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_scene(tmp_path / "example").parent


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")


def load(folder: Path, *options: str) -> RunConfig:
    return load_config(folder / "run.toml", options, {}).config


def problems(folder: Path, *options: str, purpose: config_checks.Purpose = "train") -> str:
    return "\n".join(config_checks.problems(load(folder, *options), purpose))


def test_a_complete_configuration_has_no_problems(folder: Path):
    assert problems(folder) == ""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["model.path=./nowhere"], "is no folder; name a Hugging Face model directory"),
        (["data.train=['nowhere.jsonl']"], "data.train: "),
        (["tools.search.corpus=nowhere.jsonl"], "tools.search.corpus ("),
        (["evaluation.sets.x=nowhere.jsonl"], "evaluation.sets.x: "),
        (["model.max_context=2048"], "must be <= 1024, the positions that the model"),
        (["run.plugins=['no-such-package-here']"], "neither a folder nor an installed package"),
        (["env.type=nomodule:Env"], "env.type ('nomodule:Env'): no module 'nomodule'"),
        (["reward.components={'nomodule:f' = 1.0}"], "reward.components ('nomodule:f')"),
    ],
)
def test_what_is_missing_is_named(folder: Path, options: list[str], expected: str):
    assert expected in problems(folder, *options)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_an_incomplete_model_is_explained(folder: Path, name: str, expected: str):
    (folder / "model" / name).unlink()
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


def test_a_task_that_asks_for_an_unknown_tool_is_named(folder: Path):
    (folder / "train.jsonl").write_text(task_line("a", tools=["serch"]))
    assert "task 'a' asks for the tool 'serch'; offered are ['search']" in problems(folder)


def test_user_code_is_found_in_plugin_folders_without_being_imported(folder: Path):
    (folder / "mine").mkdir()
    (folder / "mine" / "my_environment_module.py").write_text("raise RuntimeError('imported')")
    toml = RUN_TOML.replace('dir = "runs/demo"', 'dir = "runs/demo"\nplugins = ["mine"]')
    (folder / "run.toml").write_text(toml)
    assert problems(folder, "env.type=my_environment_module:Env") == ""
    assert "my_environment_module" not in sys.modules


def test_purposes_need_different_tables(folder: Path):
    bare = '[model]\npath = "model"\nmax_context = 512\n[env]\nmax_tokens_per_turn = 64\n'
    (folder / "run.toml").write_text(bare)
    assert "table [data] is missing" in problems(folder)
    assert "evaluation.sets is empty" in problems(folder, purpose="evaluate")
    assert "table [sft] is missing" in problems(folder, purpose="sft")
    assert problems(folder, purpose="serve") == ""


def test_the_worst_case_in_flight_must_fit_the_memory_of_redis(folder: Path):
    # (1 + 1) x 64 x 32 trajectories of training, and 512 of evaluation
    wanted = worst_case_bytes(2 * 64 * 32 + 512, 512)
    options = [
        "learner.max_staleness=1",
        "learner.groups_per_batch=64",
        "learner.group_size=32",
    ]
    assert config_checks.worst_case_redis_bytes(load(folder, *options)) == wanted
    assert problems(folder, *options, "redis.maxmemory_mb=128") == ""
    text = problems(folder, *options, "redis.maxmemory_mb=64")
    assert text.startswith("redis.maxmemory_mb (64 MiB) must hold the worst case in flight")
    assert "learner.groups_per_batch 64" in text


def test_check_lists_every_problem(folder: Path):
    (folder / "corpus.jsonl").unlink()
    (folder / "model" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError) as caught:
        config_checks.check(load(folder), "train")
    assert len(str(caught.value).splitlines()) == 2


def test_a_port_in_use_is_named_with_the_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            config_checks.check_port(ListenTable(port=port), "rollout")
    message = str(caught.value)
    assert f"rollout.port ({port})" in message
    assert "rollout.port = 0" in message


def test_a_host_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"rollout\.host \(192\.0\.2\.1\)"):
        config_checks.check_port(ListenTable(host="192.0.2.1", port=1234), "rollout")


def test_port_zero_needs_no_check():
    config_checks.check_port(ListenTable(host="192.0.2.1", port=0), "rollout")


def test_listeners_are_what_this_run_starts(folder: Path):
    keys = [key for key, _ in config_checks.listeners(load(folder))]
    assert keys == ["tools.search", "reward", "rollout"]
    remote = load(folder, "tools.search.url=http://h:1")
    assert [key for key, _ in config_checks.listeners(remote)] == ["reward", "rollout"]
