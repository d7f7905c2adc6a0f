"""Tools other than the search of the main job, called by a real model in a real run.

The run is then ended by `kill -9` of its launcher, which takes every process with it.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import (
    agent_r1,
    alive,
    descendants,
    set_options,
    started,
    steps,
    wait_until,
    write_config,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
STOP_TIMEOUT_S = 60.0

IN_SANDBOX = """
from agent_r1.tools.sandbox.python_exec import PythonExec


class Shout(PythonExec):
    name = "search"
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}

    async def call(self, arguments, context):
        return await super().call({"code": f"print({arguments['query']!r}.upper())"}, context)
"""


def replace_search(config: Path, table: str) -> None:
    """Put another [tools.search] into a file of `write_config`."""
    text = config.read_text()
    before, _, rest = text.partition("[tools.search]")
    config.write_text(f"{before}{table}\n[learner]{rest.partition('[learner]')[2]}")


def stored_calls(run_dir: Path) -> list[dict[str, Any]]:
    """Return every call of the stored trajectories of the first step."""
    lines = (run_dir / "trajectories" / "step_000001.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [call for row in rows for turn in row["turns"] for call in turn["calls"]]


@dataclass(frozen=True)
class KilledRun:
    """A run whose launcher was killed while it trained."""

    folder: Path
    below: dict[int, str]
    """Every process that the launcher had below it, by id: its title."""


@pytest.fixture(scope="module")
def killed_run(
    tmp_path_factory: pytest.TempPathFactory, world_files: Path, tiny_base_dir: Path
) -> KilledRun:
    """A run with a tool of an MCP server that runs Python in the sandbox."""
    folder = tmp_path_factory.mktemp("killed")
    served = write_config(folder / "served", run_id="shout", base=tiny_base_dir, world=world_files)
    (folder / "plugins").mkdir()
    (folder / "plugins" / "shout.py").write_text(IN_SANDBOX)
    plugins = json.dumps([str(folder / "plugins")])
    served.write_text(served.read_text().replace("seed = 3", f"seed = 3\nplugins = {plugins}"))
    replace_search(served, '[tools.search]\ntype = "shout:Shout"\n')

    config = write_config(folder, run_id="mcp", base=tiny_base_dir, world=world_files)
    command = json.dumps(agent_r1("tools", "mcp", served, "search"))
    replace_search(
        config,
        '[tools.search]\ntype = "mcp"\n[tools.search.settings]\ntool = "search"\n'
        f"command = {command}\n",
    )
    run_dir = folder / "run"
    options = {"learner.steps": 1000, "evaluation.sets": "{}", "evaluation.every": 0}
    with started("train", config, "--run-dir", run_dir, *set_options(options)) as process:
        # The trajectories of a step are written after its line.
        wait_until(lambda: len(steps(run_dir)) >= 2, "the second step", process)
        below = descendants(process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(STOP_TIMEOUT_S)
    return KilledRun(run_dir, below)


def test_a_tool_of_an_mcp_server_that_runs_python_in_the_sandbox(killed_run: KilledRun):
    first = steps(killed_run.folder)[0]
    assert first["group/survivors_mean"] == 4.0  # nothing was lost: 4 groups of 4
    assert first["results/failed"] == 0.0
    calls = stored_calls(killed_run.folder)
    # A turn that ends in the middle of a call, or a call without its query, is the model's doing.
    assert {call["status"] for call in calls} <= {"ok", "malformed"}
    answered = [call for call in calls if call["status"] == "ok"]
    assert len(answered) >= 6  # of the stored half of the trajectories, each searches once or more
    for call in answered:
        assert call["text"].startswith(call["arguments"]["query"].upper())
        assert call["version"]


def test_no_process_survives_kill_9_of_the_launcher(killed_run: KilledRun):
    wait_until(lambda: not alive(killed_run.below), "every process to end")
    titles = killed_run.below.values()
    assert any("EngineCore" in title for title in titles)
    assert any("tools mcp" in title for title in titles)
    # redis, search and its MCP server, reward, learner, rollout and its engine
    assert len(killed_run.below) >= 7
