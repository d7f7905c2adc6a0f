"""`agent-r1 diagnose` over a real Redis; one coroutine stands in for rollout and reward."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from agent_r1.cli import main as cli
from agent_r1.config.run import Config, load_config
from agent_r1.launch import local_client
from agent_r1.runtime.config import RedisConfig, RunConfig
from agent_r1.runtime.evaluation_client import ATTEMPT
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from tests.support.builders import scored
from tests.support.config_scene import RUN_TOML, load_nothing, task_line, write_scene
from tests.support.fakes import running

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

POLICIES = """
class Knows:
    def __init__(self, task, word="there"):
        self.word = word

    def turn(self, observations):
        if not observations:
            call = '{"name": "search", "arguments": {"query": "place"}}'
            return f"<tool_call>{call}</tool_call>"
        assert "place is there" in observations[0]
        return f"<answer>{self.word}</answer>"
"""
TABLES = """
[diagnose]
groups = 2
attempts = 4
oracle = { type = "diagnosed_policies:Knows" }

[diagnose.degenerate]
guesses = { type = "diagnosed_policies:Knows", options = { word = "elsewhere" } }
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load_nothing(monkeypatch)
    toml = RUN_TOML.replace("[run]", '[run]\nplugins = ["."]') + TABLES
    path = write_scene(tmp_path / "example", toml)
    (path.parent / "diagnosed_policies.py").write_text(POLICIES)
    passage = {"id": "1", "title": "Place", "text": "The place is there."}
    (path.parent / "corpus.jsonl").write_text(json.dumps(passage) + "\n")
    (path.parent / "held_out.jsonl").write_text(task_line("c") + task_line("d"))
    return path


async def answer_questions(redis_url: str, run_id: str) -> None:
    """Answer wrongly at temperature 0, and rightly in every second attempt otherwise."""
    async with await Broker.connect(redis_url, run_id) as broker:
        keys = broker.keys
        async with broker.consumer(keys.tasks, RolloutTask, group="g", consumer="fake") as tasks:
            while True:
                for entry in await tasks.read(4, 0.2):
                    rollout = entry.message
                    attempt = int(str(rollout.task.metadata.get(ATTEMPT, 1)))
                    right = float(rollout.sampling.temperature > 0 and attempt % 2 == 0)
                    assert rollout.reply_stream is not None
                    reply = scored(rollout, total=right, num_sampled=3 + attempt)
                    await tasks.finish(entry, [(rollout.reply_stream, reply)])


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch, redis_url: str, run_id: str) -> None:
    """Let the client ask one coroutine instead of services that the launcher starts."""

    def run_client(
        config: Config, client: Callable[[Config], Coroutine[Any, Any, Any]], report: Any
    ) -> Any:
        tables = {"run": RunConfig(id=run_id), "redis": RedisConfig(url=redis_url)}

        async def ask() -> Any:
            async with running(answer_questions(redis_url, run_id)):
                return await client(config.model_copy(update=tables))

        return asyncio.run(ask())

    monkeypatch.setattr(local_client, "run_client", run_client)


@pytest.mark.usefixtures("services")
def test_every_figure_is_printed_and_written_with_its_bound(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "figures.json"
    code = cli.main(["diagnose", str(file), "--out", str(out)])
    printed = capsys.readouterr().out
    record = json.loads(out.read_text())
    figures = {figure["name"]: figure for figure in record["figures"]}
    assert {name: (f["value"], f["passed"]) for name, f in list(figures.items())[:5]} == {
        "oracle, held_out": (1.0, True),
        "guesses, held_out": (0.0, True),
        "greedy, held_out": (0.0, True),
        "pass@4, held_out": (1.0, True),
        "mixed groups": (1.0, True),
    }
    # Trajectories that say the same tokens, some longer than others, have much the same gradient.
    assert 0.5 < figures["gradient in one direction"]["value"] <= 1.0
    # Without names of states, turns are credited like trajectories.
    assert figures["cosine with turn-level GAE"]["value"] > 0.9
    missed = [name for name, figure in figures.items() if not figure["passed"]]
    assert missed == ["gradient in one direction", "cosine with turn-level GAE"]
    assert (code, record["passed"]) == (1, False)
    assert "missed: gradient in one direction; cosine with turn-level GAE" in printed
    for name in figures:
        assert name in printed


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("diagnose.groups=1", r"diagnose.groups \(1\) must be at least learner.groups_per_batch"),
        ("diagnose.oracle.type=diagnosed_policies:Nobody", "Nobody"),
        ("diagnose.oracle.options.wort=a", "correct its options"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str], option: str, message: str
):
    assert cli.main(["diagnose", str(file), "--set", option]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_set_that_is_not_evaluated_is_refused(file: Path):
    with pytest.raises(ValueError, match=r"diagnose\.sets names 'other'.*held_out"):
        load_config(file, ["diagnose.sets=['other']"], {})
