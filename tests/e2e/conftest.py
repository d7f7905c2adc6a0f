"""What the end-to-end tests share: two deterministic runs of one configuration.

A start of every service costs most of a minute of CPU, so one run serves several files;
tests/support/parallel.py keeps these in one process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.otlp_receiver import ReceivedSpan, receiving
from tests.support.prometheus import scrape, watching
from tests.support.runs import (
    alive,
    descendants,
    finished,
    processes_naming,
    set_options,
    started,
    steps,
    wait_until,
    write_config,
)
from tests.support.sockets import is_exposed, listening

STOP_TIMEOUT_S = 60.0
FAIL_TIMEOUT_S = 180.0
STEPS = 5
DETERMINISTIC = {
    "run.deterministic": "true",
    "learner.algorithm": "ppo",  # policy, critic and reference
    "learner.kl": "reward",
    "learner.group_size": 2,
    "learner.trajectories_per_step": 8,
}
BREAKING_TOOL = """
from pathlib import Path

from agent_r1 import Tool
from agent_r1.tools.search.config import SearchConfig
from agent_r1.tools.search.tool import open_search_tool


class BreakingSearch(Tool):
    name = "search"

    def __init__(self, breaks: str, **settings):
        self._breaks = Path(breaks)
        self._search = open_search_tool("search", SearchConfig(type="search", **settings))
        self.description, self.parameters = self._search.description, self._search.parameters

    async def start(self):
        await self._search.start()

    async def stop(self):
        await self._search.stop()

    async def call(self, arguments, context):
        if self._breaks.exists():
            raise KeyError("no such index")
        return await self._search.call(arguments, context)
"""


@dataclass(frozen=True)
class ResumedRun:
    """A run that was disturbed and resumed."""

    folder: Path
    config: Path
    killed: dict[int, str]
    """Every process that its launcher had below it when it was killed, by id: its title."""
    sockets: list[tuple[str, bool]]
    """What listened while it trained, and whether other machines could use it without a token."""
    left_behind: list[str]
    """Names in the folder for temporary files, when it had ended."""


@pytest.fixture(scope="session")
def resumed_run(
    tmp_path_factory: pytest.TempPathFactory, world_files: Path, tiny_base_dir: Path
) -> ResumedRun:
    """A run whose rollout server is killed with SIGKILL, and then its launcher; it is resumed and
    goes to its end."""
    folder = tmp_path_factory.mktemp("resumed")
    run_dir = folder / "run"
    config = write_config(folder, run_id="e2e", base=tiny_base_dir, world=world_files)
    options = set_options(
        {
            **DETERMINISTIC,
            "evaluation.every": 4,
            "rollout.host": "0.0.0.0",
            "rollout.advertise_host": "127.0.0.1",
        }
    )
    with started("train", config, "--run-dir", run_dir, *options) as process:
        wait_until(lambda: len(steps(run_dir)) >= 1, "the first step", process)
        [server] = [
            pid
            for pid, command in processes_naming(str(run_dir)).items()
            if re.search(r"agent-r1 serve rollout|serve rollout", command)
            and "subreaper" not in command
        ][:1]
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: len(steps(run_dir)) >= 3, "a step after the kill", process)
        below = descendants(process)
        sockets = [
            (f"{address}:{port} {below[pid]}", is_exposed(address, port))
            for address, port, pid in listening(below)
        ]
        process.kill()
        process.wait(STOP_TIMEOUT_S)
    wait_until(lambda: not alive(below), "every process to end")
    # A short path: sockets are made in it.
    temporary = Path(tempfile.mkdtemp())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        finished("train", "--resume", run_dir, *set_options({"learner.steps": STEPS}))
    left_behind = [path.name for path in temporary.iterdir()]
    shutil.rmtree(temporary)
    return ResumedRun(run_dir, config, below, sockets, left_behind)


@dataclass(frozen=True)
class FailedRun:
    """A run that nothing disturbed until its tool broke."""

    folder: Path
    output: str
    returncode: int
    metrics: dict[str, str]
    """What the services answered to `GET /metrics` while it trained, by job."""
    prometheus: dict[str, Any] | None
    """What a Prometheus that watched it knows: `metadata`, `rules`, and the results of the
    dashboards' `queries`; None where there is no Prometheus."""
    spans: list[ReceivedSpan]
    """What its services sent to an OpenTelemetry collector."""


@pytest.fixture(scope="session")
def failed_run(
    tmp_path_factory: pytest.TempPathFactory, world_files: Path, tiny_base_dir: Path
) -> FailedRun:
    """The configuration of `resumed_run`, left alone for as many steps; then its tool raises."""
    folder = tmp_path_factory.mktemp("failed")
    breaks = folder / "breaks"
    (folder / "plugins").mkdir()
    (folder / "plugins" / "breaking_tool.py").write_text(BREAKING_TOOL)
    config = write_config(folder, run_id="broken", base=tiny_base_dir, world=world_files)
    tool = f'type = "breaking_tool:BreakingSearch"\n[tools.search.settings]\nbreaks = "{breaks}"\n'
    config.write_text(config.read_text().replace('type = "search"\n', tool))
    options = {
        **DETERMINISTIC,
        "run.plugins": json.dumps([str(folder / "plugins")]),
        "learner.steps": 1000,
        "learner.checkpoint_every": 0,
        "evaluation.every": 0,
        "evaluation.before": "false",
    }
    run_dir = folder / "run"
    with (
        receiving() as collector,
        started(
            "train",
            config,
            "--run-dir",
            run_dir,
            *set_options({**options, "run.otlp_endpoint": collector.url}),
        ) as process,
    ):
        wait_until(lambda: len(steps(run_dir)) >= STEPS, f"step {STEPS}", process)
        pages = scrape(run_dir)

        def wait(condition: Callable[[], bool], what: str) -> None:
            wait_until(condition, what, process)

        with watching(run_dir, folder / "prometheus", wait) as prometheus:
            known = None if prometheus is None else prometheus.look()
        breaks.touch()
        output, _ = process.communicate(timeout=FAIL_TIMEOUT_S)
    return FailedRun(run_dir, output, process.returncode, pages, known, collector.spans)
