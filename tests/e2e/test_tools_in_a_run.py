"""Tools other than the search of the main job, called by a real model in a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import agent_r1, finished, write_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

IN_SANDBOX = """
from agent_r1.tools.sandbox.python_exec import PythonExec


class Shout(PythonExec):
    name = "search"
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}

    async def call(self, arguments, context):
        return await super().call({"code": f"print({arguments['query']!r}.upper())"}, context)
"""


def stored_calls(run_dir: Path) -> list[dict[str, Any]]:
    """Return every call of the stored trajectories."""
    rows = [
        json.loads(line)
        for path in sorted((run_dir / "trajectories").glob("step_*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [call for row in rows for turn in row["turns"] for call in turn["calls"]]


def train_one_step(config: Path, run_dir: Path, table: str) -> list[dict[str, Any]]:
    """Train with another [tools.search]; return the calls that were answered."""
    text = config.read_text()
    before, _, rest = text.partition("[tools.search]")
    config.write_text(f"{before}{table}\n[learner]{rest.partition('[learner]')[2]}")
    options = ["learner.steps=1", "evaluation.sets={}", "evaluation.every=0"]
    sets = [part for option in options for part in ("--set", option)]
    finished("train", config, "--run-dir", run_dir, *sets)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["trajectories_trained"] == 16
    calls = stored_calls(run_dir)
    assert len(calls) >= 8  # of the stored half of the trajectories, each searches once or more
    # A turn that ends in the middle of a call, or a call without its query, is the model's doing.
    assert {call["status"] for call in calls} <= {"ok", "malformed"}
    return [call for call in calls if call["status"] == "ok"]


def test_a_tool_of_an_mcp_server(tmp_path: Path, world: Path, tiny_base_dir: Path):
    served = write_config(tmp_path / "served", run_id="mcp", base=tiny_base_dir, world=world)
    command = json.dumps(agent_r1("tools", "mcp", served, "search"))
    table = (
        '[tools.search]\ntype = "mcp"\n[tools.search.settings]\ntool = "search"\n'
        f"command = {command}\n"
    )
    config = write_config(tmp_path, run_id="mcp", base=tiny_base_dir, world=world)
    calls = train_one_step(config, tmp_path / "run", table)
    assert len(calls) >= 6
    assert all(call["text"].startswith(" ") and call["version"] for call in calls)


def test_a_tool_that_runs_python_in_the_sandbox(tmp_path: Path, world: Path, tiny_base_dir: Path):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "shout.py").write_text(IN_SANDBOX)
    config = write_config(tmp_path, run_id="sandbox", base=tiny_base_dir, world=world)
    config.write_text(config.read_text().replace("seed = 3", 'seed = 3\nplugins = ["plugins"]'))
    table = '[tools.search]\ntype = "shout:Shout"\n'
    calls = train_one_step(config, tmp_path / "run", table)
    assert len(calls) >= 6
    for call in calls:
        query = call["arguments"]["query"]
        assert call["text"].startswith(query.upper())
