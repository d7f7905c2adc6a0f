"""The command line: what it imports, how it fails, what the reading commands print."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_r1.cli import main as cli
from agent_r1.cli import policy as cli_policy
from agent_r1.config.run import Config, load_config, write_config
from agent_r1.config.sources import ConfigError
from agent_r1.learner.checkpoints.ledger import LedgerNumbers
from agent_r1.learner.checkpoints.run_store import open_run_store
from agent_r1.learner.engine.ranks.rank_env import RankPlace
from agent_r1.runtime.config import LoraConfig
from agent_r1.weights.adapters import ADAPTER_FILE, write_adapter_config
from tests.support.config_scene import write_scene
from tests.support.parsers import parsers

HEAVY = ("torch", "vllm", "transformers", "deepspeed", "tantivy", "fastapi", "redis", "rich")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_scene(tmp_path / "example")


@pytest.fixture(autouse=True)
def _logging():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def fails_with(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("agent-r1: error: ")
    assert "Traceback" not in captured.err
    return captured.err


def test_the_package_and_the_command_load_nothing_heavy():
    program = f"import sys, agent_r1.cli.main; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "left_out"),
    [
        ("agent_r1.tools.loading", ("fastapi", "uvicorn", "redis", "mcp", "httpx")),
        ("agent_r1.tools.main", ("mcp", "tantivy", "elasticsearch")),
    ],
)
def test_a_tool_service_loads_only_what_it_needs(module: str, left_out: tuple[str, ...]):
    program = f"import {module}, sys; print([m for m in {left_out!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_what_user_code_builds_on_comes_without_torch_or_vllm():
    program = (
        "from agent_r1 import Tool, ToolEnv, text_result, ToolResult; import sys; "
        "print([m for m in ('torch', 'vllm', 'transformers', 'redis') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    import agent_r1

    assert "Tool" in dir(agent_r1)
    with pytest.raises(AttributeError, match="Toool"):
        _ = agent_r1.Toool  # pyright: ignore[reportAttributeAccessIssue]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for command in ("train", "serve", "config", "evaluate", "sft", "chat", "show", "dead-letters"):
        assert command in text


def test_config_show_prints_values_and_where_they_came_from(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AGENT_R1__TOOLS__SEARCH__TOP_K", "3")
    assert cli.main(["config", "show", str(file), "--set", "learner.steps=9"]) == 0
    rows = [line.split("#") for line in capsys.readouterr().out.splitlines()]
    shown = {row[0].strip(): row[-1].strip() for row in rows}
    assert shown["learner.steps = 9"] == "--set learner.steps"
    assert shown["tools.search.top_k = 3"] == "variable AGENT_R1__TOOLS__SEARCH__TOP_K"
    assert shown["learner.group_size = 4"] == f"file {file}"
    assert shown["learner.max_staleness = 0"] == "default"


def test_config_show_hides_passwords(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AGENT_R1__REDIS__URL", "redis://:pw@h/0")
    assert cli.main(["config", "show", str(file)]) == 0
    text = capsys.readouterr().out
    assert "redis://:***@h/0" in text
    assert "pw@" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "show", "{file}", "--set", "redis.url=redis://me:hunter2@h/0"],
        ["config", "show", "{file}", "--set", 'redis.url = "redis://:hunter2@h/0"'],
        ["status", "--redis", "redis://:hunter2@h/0", "--id", "p"],
    ],
)
def test_a_password_on_the_command_line_is_refused(
    arguments: list[str], file: Path, capsys: pytest.CaptureFixture[str]
):
    assert cli.main([one.format(file=file) for one in arguments]) == 2
    said = capsys.readouterr().err
    assert "can read in the list of processes; set the variable AGENT_R1_" in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], "name a CONFIG to start a run, or --resume DIR"),
        (["train", "{file}", "--resume", "x"], "name a CONFIG to start a run, or --resume DIR"),
        (["train", "--resume", "{folder}"], "holds no run to resume (config.json is missing)"),
        (["train", "--resume", "x", "--run-dir", "y"], "cannot be combined"),
        (
            ["train", "--resume", "file://{folder}/none", "--run-dir", "{folder}/new"],
            "holds no run",
        ),
        (["train", "--resume", "ftp://host/x"], "--resume ('ftp://host/x') must start with one of"),
        (["train", "{file}", "--set", "learner.stepz=1"], "unknown key 'stepz'"),
        (["serve", "rollout", "{file}"], "redis.url is not set"),
        (["serve", "reward", "{file}"], "redis.url is not set"),
        (["serve", "learner", "{file}"], "redis.url is not set"),
        (
            ["serve", "serch", "{file}"],
            "there is no service 'serch'; the services are rollout, reward, learner",
        ),
        (["serve", "tool", "{file}", "--name", "x"], "no service 'x'"),
        (["serve", "tool", "no_such_module:Tool"], "module no_such_module cannot be imported"),
        (
            ["serve", "tool", "agent_r1.tools.python_exec:PythonExec"],
            "agent_r1.tools.python_exec is now agent_r1.tools.sandbox.python_exec",
        ),
        (["status"], "name a run folder, or give --redis with --id or --pool"),
        (["tools", "drain", "search", "--run", "{folder}"], "has no config.json"),
        (["evaluate", "{file}", "--policy", "{folder}", "--out", "o"], "has no config.json"),
        (["sft", "{file}"], "table [sft] is missing"),
        (["chat", "{folder}"], "is not in a run folder"),
        (["show", "{folder}"], "has no folder trajectories"),
        (["show", "{folder}", "--dead-letter", "all"], "has no config.json; name a run folder"),
    ],
)
def test_mistakes_are_explained_in_one_message(
    arguments: list[str], expected: str, file: Path, capsys: pytest.CaptureFixture[str]
):
    filled = [a.format(file=file, folder=file.parent) for a in arguments]
    assert expected in fails_with(filled, capsys)


def test_a_learner_that_is_started_again_on_a_finished_run_says_where_the_results_are(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/done")
    folder.mkdir(parents=True)
    (folder / "ledger.json").write_text('{"incarnation": 1}')
    (folder / "summary.json").write_text('{"status": "finished", "steps": 3}')
    options = ["learner.steps=3", f"run.dir={folder}", "redis.url=redis://127.0.0.1:1/0"]
    sets = [word for option in options for word in ("--set", option)]
    assert cli.main(["serve", "learner", str(file), "--resume-if-begun", *sets]) == 0
    said = capsys.readouterr().out
    assert (
        said == "the run has finished; its results are in runs/done: see runs/done/summary.json\n"
    )


def test_a_stopped_learner_is_no_finished_one_for_what_has_started_its_ranks(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agent_r1.learner.main.train", lambda *_, **__: "interrupted")
    command = ["serve", "learner", str(file), "--set", "redis.url=redis://127.0.0.1:1/0"]
    assert cli.main(command) == 0
    for name, value in RankPlace(0, 1, 0, "node-0", 29500).environment().items():
        monkeypatch.setenv(name, value)
    assert cli.main(command) == 130


def test_a_run_folder_with_something_in_it_is_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    error = fails_with(["train", str(file), "--run-dir", str(run)], capsys)
    assert f"run folder {run} is not empty" in error
    assert f"agent-r1 train --resume {run}" in error


def test_a_run_that_is_running_is_not_started_twice(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    run.mkdir()
    write_config(load_config(file, [f"run.dir={run}"], {}).config, run / "config.json")
    command = Path("/proc/self/cmdline").read_bytes().decode()
    launcher = {"pid": os.getpid(), "command": command, "state_dir": "x", "started_at": 0}
    (run / "launcher.json").write_text(json.dumps(launcher))
    error = fails_with(["train", "--resume", str(run)], capsys)
    assert f"is still running (process {os.getpid()})" in error


def test_a_run_is_resumed_from_a_url_into_a_folder_of_this_machine(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    there, here, url = tmp_path / "there", tmp_path / "here", f"file://{tmp_path}/store"
    set_there = [f"run.dir={there}", f"learner.checkpoint_url={url}", "engine.lr=0.5"]
    config = load_config(file, set_there, {}).config
    there.mkdir()
    write_config(config, there / "config.json")
    store = open_run_store(config.run, config.learner, resume=False)
    assert store is not None
    store.claim(LedgerNumbers())
    started: list[tuple[Config, bool]] = []

    def run_training(config: Config, *, resume: bool) -> int:
        started.append((config, resume))
        return 0

    monkeypatch.setattr("agent_r1.launch.local.run_training", run_training)
    arguments = ["train", "--resume", f"{url}/demo", "--run-dir", str(here)]
    assert cli.main([*arguments, "--set", "learner.steps=7"]) == 0
    ((resumed, resume),) = started
    assert resume
    assert (resumed.run.dir, resumed.run.id) == (here, "demo")
    assert (resumed.learner.checkpoint_url, resumed.engine.lr) == (url, 0.5)
    assert resumed.learner.steps == 7
    assert (here / "config.json").stat().st_mode & 0o077 == 0
    assert f"{here} holds a run; continue it with" in fails_with(arguments, capsys)


@pytest.mark.parametrize(
    ("command", "table"),
    [
        (["rollout"], "rollout"),
        (["reward"], "reward"),
        (["search"], "tools.search"),
        (["learner", "--set", "learner.transport=http"], "learner.server"),
    ],
)
def test_a_service_for_other_machines_without_a_token_connects_to_nothing(
    command: list[str],
    table: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    async def connect(*_: object, **__: object) -> None:
        raise AssertionError("it has connected to Redis")

    monkeypatch.delenv("AGENT_R1_TOKEN", raising=False)
    monkeypatch.setattr("agent_r1_proto.connection.RedisConnection.connect", connect)
    service, *options = command
    sets = ["--set", "redis.url=redis://127.0.0.1:1/0", "--set", f"{table}.host=0.0.0.0"]
    error = fails_with(["serve", service, str(file), *options, *sets], capsys)
    assert f"{table}: host (0.0.0.0) lets other machines call this service" in error
    assert "set run.token_file or the variable AGENT_R1_TOKEN" in error


# --- show --------------------------------------------------------------------------------------


def record(**changes: Any) -> dict[str, Any]:
    call = {
        "tool": "search",
        "arguments": {"query": "Ann"},
        "status": "ok",
        "text": "Ann lives in Oslo.",
        "error": "",
        "version": "3",
        "latency_ms": 12.0,
        "process_reward": None,
    }
    values = {
        "step": 1,
        "group_id": 7,
        "sample_index": 0,
        "task_id": "q1",
        "payload": {"answers": ["Oslo"]},
        "prompt": [{"role": "user", "content": "Where does Ann live?"}],
        "status": "COMPLETED",
        "reason": "answer",
        "turns": [
            {"text": "<tool_call>Ann</tool_call>", "calls": [call]},
            {"text": "<answer>Oslo</answer>", "calls": [], "process_reward": 0.25},
        ],
        "reward": {"total": 1.0, "components": {"exact_match": 1.0}, "prediction": "Oslo"},
        "advantage": 0.5,
        "policy_versions": [2, 3],
        "num_tokens": 60,
        "latency_ms": 1500.0,
    }
    return {**values, **changes}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    trajectories = folder / "trajectories"
    trajectories.mkdir(parents=True)
    failed = record(group_id=8, status="FAILED", reason="tool_timeout: search", reward=None)
    files = {
        "step_000001": [record(), failed],
        "step_000002": [record(step=2, group_id=9, task_id="q9")],
        "eval_before": [record(task_id="held_out_1")],
    }
    for name, records in files.items():
        text = "".join(json.dumps(line) + "\n" for line in records)
        (trajectories / f"{name}.jsonl").write_text(text)
    return folder


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["show", *arguments]) == 0
    return capsys.readouterr().out


def test_show_tells_who_wrote_what(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    text = shown([str(run_folder), "--step", "1", "--group", "7"], capsys)
    assert "user: Where does Ann live?" in text
    assert "model> <tool_call>Ann</tool_call>" in text
    assert '[search {"query": "Ann"}, ok, version 3, 12 ms]' in text
    assert "tool<  Ann lives in Oslo." in text
    assert "model> <answer>Oslo</answer>" in text
    assert "process reward of the turn 0.25" in text
    assert "reward 1 (exact_match 1); advantage +0.500; policy v2, v3" in text
    assert "group 8" not in text


def test_show_begins_with_the_newest_step(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    text = shown([str(run_folder), "--limit", "1"], capsys)
    assert "q9" in text
    assert "2 more match; --limit 3 shows them all" in text


def test_show_failed_gives_the_reason(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    text = shown([str(run_folder), "--failed"], capsys)
    assert "FAILED: tool_timeout: search" in text
    assert "no reward" in text
    assert "group 7" not in text


def test_show_reads_evaluations(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    assert "held_out_1" in shown([str(run_folder), "--eval", "before"], capsys)
    error = fails_with(["show", str(run_folder), "--eval", "after"], capsys)
    assert "no stored evaluation 'after'" in error
    assert "['before']" in error


def test_show_says_which_steps_are_stored(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    error = fails_with(["show", str(run_folder), "--step", "5"], capsys)
    assert "the stored steps are 1 to 2" in error


def test_show_says_when_nothing_matches(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    assert "no stored trajectory" in shown([str(run_folder), "--group", "99"], capsys)


# --- MODEL_OR_RUN ------------------------------------------------------------------------------


def test_a_run_means_its_last_checkpoint(file: Path, tmp_path: Path):
    run = tmp_path / "run"
    for step in (2, 10):
        model = run / "checkpoints" / f"step_{step:06d}" / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    config = load_config(file, [], {}).config
    write_config(config, run / "config.json")
    last = run / "checkpoints" / "step_000010" / "model"
    assert cli_policy.policy_model(str(run)) == str(last)
    assert cli_policy.with_policy(config, str(run)).model.path == str(last)
    assert cli_policy.config_file_of(str(last)) == run / "config.json"


def test_an_adapter_is_the_policy_on_top_of_its_model(file: Path, tmp_path: Path):
    adapter = tmp_path / "run" / "checkpoints" / "step_000003" / "model"
    adapter.mkdir(parents=True)
    base = file.parent / "model"
    lora = LoraConfig(rank=4, targets=["k_proj", "q_proj"])
    write_adapter_config(adapter, lora, str(base))
    (adapter / ADAPTER_FILE).write_bytes(b"")
    write_config(load_config(file, [], {}).config, tmp_path / "run" / "config.json")
    started = lora.model_copy(update={"path": adapter})

    config = load_config(file, ["model.path=another", "model.lora.rank=2"], {}).config
    model = cli_policy.with_policy(config, str(tmp_path / "run")).model
    assert (model.path, model.lora, model.policy) == (str(base), started, str(adapter))
    # A whole model in its place has no adapter.
    assert cli_policy.with_policy(config, str(base)).model.lora is None

    options = cli_policy.policy_options(str(adapter))
    assert load_config(file, options, {}).config.model.lora == started

    write_adapter_config(adapter, lora, str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"base_model_name_or_path of .*gone"):
        cli_policy.policy_options(str(adapter))


def test_a_checkpoint_is_described_by_its_step_and_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoint = tmp_path / "runs" / "x" / "checkpoints" / "step_000004"
    checkpoint.mkdir(parents=True)
    described = cli_policy.describe_policy(str(checkpoint / "model"))
    assert described == f"policy of step 4, {tmp_path}/runs/x"
    (checkpoint / "learner.json").write_text('{"step": 4, "policy_version": 5}')
    monkeypatch.chdir(tmp_path)
    assert cli_policy.describe_policy(str(checkpoint / "model")) == "policy of step 4 (v5), runs/x"
    assert cli_policy.describe_policy("owner/name") == "owner/name"
    assert cli_policy.describe_policy("/models/model") == "/models/model"


def test_a_run_without_a_checkpoint_is_explained(file: Path, tmp_path: Path):
    write_config(load_config(file, [], {}).config, tmp_path / "config.json")
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        cli_policy.policy_model(str(tmp_path))


def test_a_model_directory_means_itself_and_a_hub_name_stays(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    model = file.parent / "model"
    assert cli_policy.policy_model(str(model)) == str(model)
    assert cli_policy.policy_model("owner/name") == "owner/name"
    assert cli_policy.config_file_of(str(model)) is None


# --- help ----------------------------------------------------------------------------------------


def test_every_command_says_what_it_does_and_every_option_what_for():
    found = list(parsers(cli.build_parser()))
    assert len(found) > 20
    silent = [parser.prog for parser in found if not parser.description]
    silent += [
        f"{parser.prog} {action.dest}"
        for parser in found
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ("train", "evaluate", "dead-letters", "start every service on this machine")),
        (["tools"], ("drain", "rollback", "serve one tool to an MCP agent")),
        (["config"], ("show",)),
        (["dead-letters"], ("retry",)),
        (["search"], ("index",)),
    ],
)
def test_a_command_that_is_not_finished_prints_the_help(
    arguments: list[str], expected: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    assert cli.main(arguments) == 2
    text = capsys.readouterr().out
    assert all(word in text for word in expected)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    version = importlib.metadata.version("agent-r1")
    assert capsys.readouterr().out == f"agent-r1 {version}\n"


def test_search_index_prints_how_far_the_embedded_index_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    corpus, folder = tmp_path / "corpus.jsonl", tmp_path / "index"
    corpus.write_text('{"id": "p1", "title": "t", "text": "one passage"}\n')
    options = ["--backend", "embedded", "--corpus", str(corpus), "--index", str(folder)]
    assert cli.main(["search", "index", *options]) == 0
    assert "index build started" in caplog.text
    assert f"{folder}: 1 passages in " in capsys.readouterr().out
