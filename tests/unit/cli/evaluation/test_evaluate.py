"""`agent-r1 evaluate` around the services: methods, mistakes, and how an evaluation continues."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import agent_r1
from agent_r1.cli import main as cli
from agent_r1.cli.evaluation.asking import Meter
from agent_r1.cli.evaluation.settings import evaluation_facts
from agent_r1.config.findings import Findings
from agent_r1.config.run import Config, load_config
from agent_r1.evaluation.main import EvaluationRun, Progress
from agent_r1.launch import local_client
from agent_r1_proto.tools import ToolSpec
from tests.support.config_scene import RUN_TOML, load_nothing, task_line, write_scene
from tests.unit.evaluation.lines import answer


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch):
    load_nothing(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = write_scene(tmp_path / "example")
    (path.parent / "held_out.jsonl").write_text("".join(task_line(f"q{i}") for i in range(4)))
    return path


Client = Callable[[Config], Coroutine[Any, Any, None]]


class FakeLauncher:
    """Stands in for the local launcher and the services: answers `until` questions, then ends."""

    def __init__(self, until: int, error: BaseException | None, failing: int) -> None:
        self.configs: list[Config] = []
        self.asked: list[str] = []
        self._until = until
        self._error = error
        self._failing = failing

    def run_client(self, config: Config, client: Client, report: Callable[[str], None]) -> None:
        self.configs.append(config)
        asyncio.run(client(config))
        if self._error is not None:
            raise self._error

    def ask(self, evaluation: EvaluationRun, **_: Any) -> None:
        for task in evaluation.left[: self._until]:
            self.asked.append(task.id)
            failed = len(self.asked) <= self._failing
            cut: dict[str, Any] = {} if failed or len(self.asked) % 2 else {"status": "TRUNCATED"}
            reason = "tool_timeout: search" if failed else "max_turns" if cut else "answer"
            line = answer(task.id, set="held_out", failed=failed, reason=reason, **cut)
            evaluation.file.append(line)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeLauncher]:
    def install(
        until: int = 99, error: BaseException | None = None, failing: int = 0
    ) -> FakeLauncher:
        fake = FakeLauncher(until, error, failing)
        monkeypatch.setattr(local_client, "run_client", fake.run_client)
        monkeypatch.setattr(EvaluationRun, "ask", lambda self, **fields: fake.ask(self, **fields))
        return fake

    return install


def command(file: Path, *more: str) -> list[str]:
    model, out = file.parent / "model", file.parent / "scores.jsonl"
    return ["evaluate", str(file), "--policy", str(model), "--out", str(out), *more]


def test_attempts_that_make_no_sense_are_refused(file: Path, capsys: pytest.CaptureFixture[str]):
    message = "--attempts (4) with evaluation.temperature 0 would get the same answer each time"
    assert cli.main(command(file, "--attempts", "4")) == 2
    assert capsys.readouterr().err.startswith(f"agent-r1: error: {message}")


@pytest.mark.parametrize("name", ["evaluate", "compare"])
def test_help_explains_itself_without_heavy_imports(name: str):
    program = (
        "import sys\nfrom agent_r1.cli import main as cli\n"
        f"try: cli.main(['{name}', '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    text = " ".join(done.stdout.split())
    assert text.endswith("[]")
    assert "%%" not in text
    for word in {
        "evaluate": ("naive_rag", "--overwrite", "95 %", "model.path"),
        "compare": ("McNemar", "B - A"),
    }[name]:
        assert word in text


def test_scores_and_files_are_named_at_the_end(
    file: Path, launch: Callable[..., FakeLauncher], capsys: pytest.CaptureFixture[str]
):
    launch()
    assert cli.main(command(file)) == 0
    text = capsys.readouterr().out
    assert "held_out" in text
    assert "EM 1.000 [1.000, 1.000]" in text
    summary = json.loads((file.parent / "scores.summary.json").read_text())
    assert summary["sets"]["held_out"]["n"] == 4
    expected = ("agent", str(file.parent / "model"), 0, 0.0, 2)
    names = ("method", "policy", "seed", "temperature", "top_k")
    assert tuple(summary[name] for name in names) == expected


def test_python_gets_the_scores_that_the_command_writes(
    file: Path, launch: Callable[..., FakeLauncher], monkeypatch: pytest.MonkeyPatch
):
    fake = launch()
    monkeypatch.chdir(file.parent)
    options = ["evaluation.max_questions=3"]
    summary = agent_r1.evaluate(file, policy="model", out="scores.jsonl", options=options)
    assert summary == json.loads((file.parent / "scores.summary.json").read_text())
    assert summary["sets"]["held_out"]["n"] == 3
    # Answered questions are kept, and tables say what their file says.
    tables = tomllib.loads(file.read_text())
    again = agent_r1.evaluate(tables, policy="model", out="scores.jsonl", options=options)
    assert (again["sets"], len(fake.asked)) == (summary["sets"], 3)
    agent_r1.evaluate(file, policy="model", out="scores.jsonl", options=options, overwrite=True)
    assert len(fake.asked) == 6


def test_python_gets_the_errors_of_the_command(
    file: Path, launch: Callable[..., FakeLauncher], tmp_path: Path
):
    out = tmp_path / "scores.jsonl"
    with pytest.raises(ValueError, match=r"method \('rag'\) must be one of agent"):
        agent_r1.evaluate(file, policy="model", out=out, method="rag")
    with pytest.raises(ValueError, match=r"attempts \(0\) must be 1 or more"):
        agent_r1.evaluate(file, policy="model", out=out, attempts=0)
    with pytest.raises(ValueError, match="naive_rag needs --policy"):
        agent_r1.evaluate(file, out=out, method="naive_rag")
    launch(until=2, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        agent_r1.evaluate(file, policy=file.parent / "model", out=out)
    assert len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("allowed", "code"),
    [("0.05", 3), ("0.2", 3), ("0.25", 0)],  # 1 of 4 questions failed
)
def test_more_failed_questions_than_allowed_have_an_exit_status_of_their_own(
    file: Path,
    launch: Callable[..., FakeLauncher],
    capsys: pytest.CaptureFixture[str],
    allowed: str,
    code: int,
):
    launch(failing=1)
    assert cli.main(command(file, "--set", f"learner.max_lost_share={allowed}")) == code
    text = capsys.readouterr().out
    assert "n 3  failed 1" in text
    assert "!! 1 questions failed: 1 x tool_timeout: search" in text
    assert "cut off by a limit, and scored: 2 x max_turns\n" in text
    assert ("!! 1 of the 4 questions of the set held_out failed" in text) == (code == 3)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("TYPO", "MODEL_OR_RUN (TYPO) is not a folder; name a Hugging Face model directory or a"),
        ("{folder}/modle", "is not a folder; did you mean {folder}/model? Otherwise name"),
    ],
)
def test_a_policy_that_is_nothing_is_refused_before_anything_starts(
    policy: str,
    message: str,
    file: Path,
    launch: Callable[..., FakeLauncher],
    capsys: pytest.CaptureFixture[str],
):
    fake = launch()
    arguments = command(file)
    arguments[arguments.index("--policy") + 1] = policy.format(folder=file.parent)
    assert cli.main(arguments) == 2
    assert message.format(folder=file.parent) in capsys.readouterr().err
    assert fake.configs == []


def test_naive_rag_is_for_hermes_calls_only(file: Path, capsys: pytest.CaptureFixture[str]):
    options = ("--method", "naive_rag", "--set", "env.tool_format=mistral")
    assert cli.main(command(file, *options)) == 2
    assert "as a call in the format hermes" in capsys.readouterr().err


def test_naive_rag_refuses_a_tool_without_a_query_before_anything_starts(
    file: Path,
    launch: Callable[..., FakeLauncher],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    fake = launch()
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    spec = ToolSpec(name="search", version="1", description="x", parameters=schema)
    monkeypatch.setattr(
        "agent_r1.config.checks.load_everything", lambda *_, **__: Findings(specs={"search": spec})
    )
    assert cli.main(command(file, "--method", "naive_rag")) == 2
    error = capsys.readouterr().err
    assert "[tools.search] is the tool 'search' with the arguments ['city']" in error
    assert fake.configs == []


def test_ctrl_c_names_the_command_that_goes_on_and_it_does(
    file: Path, launch: Callable[..., FakeLauncher], capsys: pytest.CaptureFixture[str]
):
    launch(until=3, error=KeyboardInterrupt())
    assert cli.main(command(file, "--overwrite", "--set", "run.seed=3")) == 130
    error = capsys.readouterr().err
    assert "3 of 4 answers are kept; continue with: agent-r1 evaluate" in error
    words = shlex.split(error.rpartition("continue with: ")[2])
    assert "--overwrite" not in words
    fake = launch()
    assert cli.main(words[1:]) == 0
    assert fake.asked == ["q3"]
    assert "3 of 4 questions are answered" in capsys.readouterr().out
    # Once more: nothing is left, so nothing is started.
    idle = launch(error=AssertionError("started"))
    assert cli.main(words[1:]) == 0
    assert (idle.configs, idle.asked) == ([], [])
    assert "every question is answered" in capsys.readouterr().out


def test_a_service_that_dies_leaves_the_answers(
    file: Path, launch: Callable[..., FakeLauncher], capsys: pytest.CaptureFixture[str]
):
    launch(until=1, error=ValueError("rollout died"))
    assert cli.main(command(file)) == 2
    assert "rollout died\n1 of 4 answers are kept; continue with: " in capsys.readouterr().err
    launch(until=0, error=ValueError("rollout died"))
    assert cli.main(command(file, "--overwrite")) == 2
    assert "kept" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--method", "naive_rag"], 'method is "agent" there and "naive_rag" here'),
        (["--set", "run.seed=9"], "seed is 0 there and 9 here"),
        (["--set", "evaluation.temperature=1.0"], "temperature is 0.0 there and 1.0 here"),
        (["--set", "tools.search.top_k=5"], "tools.search.top_k is 2 there and 5 here"),
        (["--set", "env.max_turns=2"], "env.max_turns is 5 there and 2 here"),
        (["--set", "reward.components.f1=1.0"], "reward.components is"),
    ],
)
def test_another_evaluations_file_is_refused(
    file: Path,
    launch: Callable[..., FakeLauncher],
    capsys: pytest.CaptureFixture[str],
    change: list[str],
    message: str,
):
    launch(until=2)
    cli.main(command(file))
    capsys.readouterr()
    assert cli.main(command(file, *change)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "choose another --out, or use --overwrite" in error


def test_changed_questions_are_another_evaluation(
    file: Path, launch: Callable[..., FakeLauncher], capsys: pytest.CaptureFixture[str]
):
    launch()
    cli.main(command(file))
    (file.parent / "held_out.jsonl").write_text(task_line("q0", prompt="Else?"))
    assert cli.main(command(file)) == 2
    assert "sets.held_out is" in capsys.readouterr().err


def test_where_things_run_is_no_difference(file: Path, launch: Callable[..., FakeLauncher]):
    launch(until=2)
    cli.main(command(file))
    fake = launch()
    assert cli.main(command(file, "--set", "rollout.max_concurrent=3")) == 0
    assert fake.asked == ["q2", "q3"]


@pytest.mark.parametrize("method", ["agent", "naive_rag"])
def test_a_method_without_a_policy_of_its_own_needs_one(
    file: Path, capsys: pytest.CaptureFixture[str], method: str
):
    assert cli.main(["evaluate", str(file), "--method", method, "--out", "o"]) == 2
    assert f"--method {method} needs --policy" in capsys.readouterr().err


def test_the_base_model_is_the_one_of_the_configuration(
    file: Path, launch: Callable[..., FakeLauncher], tmp_path: Path
):
    fake = launch()
    out = tmp_path / "base.jsonl"
    arguments = ["evaluate", str(file), "--method", "base_tool_call", "--out", str(out)]
    assert cli.main(arguments) == 0
    assert fake.configs[0].model.path == str(file.parent / "model")
    assert json.loads((tmp_path / "base.summary.json").read_text())["method"] == "base_tool_call"


@pytest.mark.parametrize(
    ("toml", "options", "message"),
    [
        (RUN_TOML.replace("tools.search", "tools.wiki"), [], "add a table [tools.search]"),
        (RUN_TOML, ["--set", "env.enable_tools=[]"], "env.enable_tools ([]) leaves out"),
    ],
)
def test_naive_rag_needs_the_search_tool(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    toml: str,
    options: list[str],
    message: str,
):
    file = write_scene(tmp_path / "other", toml)
    assert cli.main(command(file, "--method", "naive_rag", *options)) == 2
    assert message in capsys.readouterr().err


def test_the_top_k_of_a_tool_that_runs_elsewhere_is_not_known(file: Path):
    config = load_config(file, ["tools.search.url=http://h:1"], {}).config
    facts = evaluation_facts(config)
    assert facts["top_k"] is None
    assert not any(name.startswith("tools.") for name in facts)
    json.dumps(facts)


# --- progress -----------------------------------------------------------------------------------


class Clock:
    """Goes on by a second whenever it is asked."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 1.0
        return self._now


def show_all(meter: Meter) -> None:
    for done in range(16, 128, 16):
        meter.show(Progress("retrieved", done, 120))
    for done in range(1, 121):
        meter.show(Progress("answered", done, 120, failed=done // 60, reward=done / 240))
    meter.end()


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
):
    show_all(Meter(Clock()))
    # A call takes a second: 16 retrieved in each, so 56 more take 3.5 s, which rounds to 4; and one
    # answer in each. After 30 s there is a line, whatever was done.
    assert capsys.readouterr().out.splitlines() == [
        "retrieved 64 of 120  left 4s",
        "answered 31 of 120  reward 0.129  left 1m29s",
        "answered 61 of 120  failed 1  reward 0.254  left 59s",
        "answered 91 of 120  failed 1  reward 0.379  left 29s",
        "answered 120 of 120  failed 2  reward 0.500",
    ]


def test_progress_is_one_line_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_all(Meter(Clock()))
    text = capsys.readouterr().out
    # Blanks cover what was longer before.
    last = text.rpartition("\r")[2]
    assert last.rstrip(" \n") == "answered 120 of 120  failed 2  reward 0.500"
    assert text.count("\n") == 1


def test_what_must_be_seen_stands_on_a_line_of_its_own_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    meter = Meter()
    meter.show(Progress("answered", 120, 120))
    meter.event("!! search failed")
    shown = capsys.readouterr().out.rstrip("\n").split("\n")
    assert [line.rpartition("\r")[2] for line in shown] == ["!! search failed"]


# --- choosing among branches ----------------------------------------------------------------------

REWARD_MODEL = (
    *("--set", "evaluation.temperature=1"),
    *("--set", "reward.components={exact_match = 1.0, reward_model = 0.0}"),
    *("--set", 'reward.servers.reward_model={url = "http://localhost:9/v1", model = "rm"}'),
)


def test_decoding_is_asked_for_recorded_and_continued(
    file: Path, launch: Callable[..., FakeLauncher], capsys: pytest.CaptureFixture[str]
):
    launch(until=3, error=KeyboardInterrupt())
    options = ("--decode", "beam", "--decode-max-calls", "budget", "--decode-lookahead", "0")
    assert cli.main(command(file, *options, *REWARD_MODEL)) == 130
    facts = json.loads((file.parent / "scores.jsonl.meta.json").read_text())
    assert {name: value for name, value in facts.items() if name.startswith("decoding.")} == {
        "decoding.method": "beam",
        "decoding.candidates": 4,
        "decoding.keep": 4,
        "decoding.lookahead": 0,
        "decoding.max_calls": "budget",
        "decoding.scorer": "reward_model",
    }
    words = shlex.split(capsys.readouterr().err.rpartition("continue with: ")[2])
    fake = launch()
    assert cli.main(words[1:]) == 0
    assert fake.asked == ["q3"]
    assert cli.main(command(file, "--decode", "value_guided", *REWARD_MODEL)) == 2
    assert 'decoding.method is "beam" there and "value_guided" here' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--decode-keep", "2"), "--decode-keep needs --decode METHOD"),
        (("--decode", "majority"), "--decode majority chooses among samples, and at temperature 0"),
        (
            ("--decode", "best_of_n", "--set", "evaluation.temperature=1"),
            "reward.components has no reward_model, critic or judge",
        ),
        (
            ("--decode", "best_of_n", "--decode-scorer", "exact_match", *REWARD_MODEL),
            "has no 'exact_match' that can do it",
        ),
        (
            ("--decode", "value_guided", "--decode-keep", "2", *REWARD_MODEL),
            "decoding.keep (2) must be 2 or more with the method beam and 1 with every other",
        ),
        (
            ("--decode", "majority", "--decode-candidates", "1", *REWARD_MODEL),
            "decoding.candidates (1) must be 2 or more with majority",
        ),
    ],
)
def test_decoding_that_makes_no_sense_is_refused(
    file: Path,
    launch: Callable[..., FakeLauncher],
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
):
    fake = launch()
    assert cli.main(command(file, *options)) == 2
    assert message in capsys.readouterr().err
    assert fake.configs == []


def test_a_tool_whose_calls_cannot_be_taken_back_is_refused_before_anything_starts(
    file: Path,
    launch: Callable[..., FakeLauncher],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    fake = launch()
    spec = ToolSpec(
        name="mail", version="1", description="x", parameters={"type": "object"}, sessions=True
    )
    lasting = spec.model_copy(update={"outside_effects": True})
    monkeypatch.setattr(
        "agent_r1.config.checks.load_everything", lambda *_, **__: Findings(specs={"mail": lasting})
    )
    assert cli.main(command(file, "--decode", "majority", *REWARD_MODEL)) == 2
    assert "calls of mail have effects outside their session" in capsys.readouterr().err
    assert fake.configs == []
