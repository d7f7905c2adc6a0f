"""Several learners in turn on one start of the services: real Redis and processes, stand-ins."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent_r1.config.run import Config
from agent_r1.config.sources import ConfigError
from agent_r1.launch import local_table
from agent_r1.launch.local_services import LocalServices
from agent_r1.launch.local_table import TableRun, TableView
from agent_r1.launch.supervisor import ServiceError
from agent_r1.learner.checkpoints.ledger import Ledger
from tests.integration.test_launcher_local import Stage, stage
from tests.integration.test_launcher_supervisor import FAKE_SERVICE

__all__ = ["stage"]

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]


class Table:
    """A table of two runs whose learners finish once `stage.done` exists."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.folder = stage.folder / "table"
        self.config = stage.config(f"run.dir={self.folder}")
        self.runs = [self._run(name) for name in ("first", "second")]
        self.output = io.StringIO()
        self.learners: list[str] = []

    def _run(self, name: str) -> TableRun:
        folder = self.folder / "runs" / name
        return TableRun(name, folder, self.stage.config(f"run.dir={folder}", "run.seed=3"))

    def command(
        self,
        services: LocalServices,
        service: str,
        name: str,
        *options: str,
        config_file: Path | None = None,
    ) -> list[str]:
        if config_file is None:
            return self.stage.command(services, service, name, *options)
        self.learners.append(config_file.parent.name)
        announce_dir = str(services.announce_dir(name))
        command = [sys.executable, str(FAKE_SERVICE), name, str(self.stage.journal)]
        summary = str(config_file.parent / "summary.json")
        command += ["--announce-dir", announce_dir, "--summary", summary]
        return [*command, *self.stage.options["learner"]]

    def start(self, baselines: local_table.Client | None = None) -> bool:
        view = TableView(0, self.runs, self.output)
        return local_table.run_table(
            self.config, self.folder, baselines=baselines, runs=self.runs, view=view
        )


@pytest.fixture
def table(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Table:
    stage.options["learner"] = ["--exit-when", str(stage.done)]
    table = Table(stage)

    def command(
        services: LocalServices,
        service: str,
        name: str,
        *options: str,
        config_file: Path | None = None,
    ) -> list[str]:
        return table.command(services, service, name, *options, config_file=config_file)

    monkeypatch.setattr(LocalServices, "command", command)
    return table


def test_a_run_with_a_model_of_its_own_begins_by_pushing_it(table: Table):
    # A learner pushes at its start where a version came before; the servers hold version 0.
    same, other = table.runs
    model = other.config.model.model_copy(update={"path": f"{table.stage.folder}/tuned"})
    tuned = replace(other, config=other.config.model_copy(update={"model": model}))
    table.runs = [same, tuned]
    table.stage.done.touch()
    assert table.start() is False
    assert [Ledger(run.folder).last_policy_version for run in (same, tuned)] == [0, 1]


def test_a_run_whose_ledger_is_missing_is_refused_before_anything_starts(table: Table):
    second = table.runs[1].folder
    second.mkdir(parents=True)
    (second / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"second/ledger\.json is missing"):
        table.start()
    assert table.stage.lines("start") == []


def test_services_start_once_and_the_learners_come_in_turn(table: Table):
    first, second = (run.folder for run in table.runs)
    # The first run was interrupted in its first start, at policy version 5.
    ledger = Ledger(first)
    first.mkdir(parents=True)
    ledger.next_incarnation()
    for _ in range(5):
        ledger.next_policy_version()
    served: list[Config] = []

    async def ask(config: Config) -> None:
        assert [row[0] for row in table.stage.lines("start")].count("learner") == 0
        served.append(config)

    table.stage.done.touch()
    assert table.start(ask) is False
    started = [row[0] for row in table.stage.lines("start")]
    assert sorted(started) == ["learner", "learner", "reward", "rollout", "search"]
    assert started[-2:] == ["learner", "learner"]
    assert served[0].redis.url is not None
    assert served[0].tools["search"].url is not None
    # The run that was begun continues; the new one begins after its numbers.
    assert table.learners == ["first", "second"]
    assert table.stage.lines("resume") == [["learner"]]
    numbers = Ledger(second)
    assert (numbers.last_incarnation, numbers.last_policy_version, numbers.starts) == (1, 5, 0)
    for run in table.runs:
        assert json.loads((run.folder / "config.json").read_text())["run"]["seed"] == 3
        assert (run.folder / "logs" / "learner.log").is_file()
    assert "row 2 of 2: second finished" in table.output.getvalue()
    assert not (table.folder / "launcher.json").exists()


def test_ctrl_c_stops_the_learner_first_and_the_run_after_it_is_not_begun(table: Table):
    thread = table.stage.when_up(lambda: os.kill(os.getpid(), signal.SIGINT))
    assert table.start() is True
    thread.join()
    stopped = [row[0] for row in table.stage.lines("stop")]
    assert stopped[0] == "learner"
    assert sorted(stopped) == ["learner", "reward", "rollout", "search"]
    assert not (table.runs[1].folder / "config.json").exists()


def test_a_learner_that_gives_up_ends_the_table_with_its_reason(table: Table):
    table.stage.options["learner"] = ["--complaint", "agent-r1: error: too many failures"]
    table.stage.options["learner"] += ["--exit-code", "2"]
    with pytest.raises(ServiceError, match="too many failures"):
        table.start()
    assert not (table.runs[1].folder / "config.json").exists()
