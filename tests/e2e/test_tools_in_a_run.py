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


def replace_search(config: Path, table: str) -> None:
    """Put another [tools.search] into a file of `write_config`."""
    text = config.read_text()
    before, _, rest = text.partition("[tools.search]")
    config.write_text(f"{before}{table}\n[learner]{rest.partition('[learner]')[2]}")


def stored_calls(run_dir: Path) -> list[dict[str, Any]]:
    """Return every call of the stored trajectories."""
    rows = [
        json.loads(line)
        for path in sorted((run_dir / "trajectories").glob("step_*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [call for row in rows for turn in row["turns"] for call in turn["calls"]]


def test_a_tool_of_an_mcp_server_that_runs_python_in_the_sandbox(
    tmp_path: Path, world: Path, tiny_base_dir: Path
):
    served = write_config(tmp_path / "served", run_id="shout", base=tiny_base_dir, world=world)
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "shout.py").write_text(IN_SANDBOX)
    plugins = json.dumps([str(tmp_path / "plugins")])
    served.write_text(served.read_text().replace("seed = 3", f"seed = 3\nplugins = {plugins}"))
    replace_search(served, '[tools.search]\ntype = "shout:Shout"\n')

    config = write_config(tmp_path, run_id="mcp", base=tiny_base_dir, world=world)
    command = json.dumps(agent_r1("tools", "mcp", served, "search"))
    replace_search(
        config,
        '[tools.search]\ntype = "mcp"\n[tools.search.settings]\ntool = "search"\n'
        f"command = {command}\n",
    )
    options = ["learner.steps=1", "evaluation.sets={}", "evaluation.every=0"]
    sets = [part for option in options for part in ("--set", option)]
    finished("train", config, "--run-dir", tmp_path / "run", *sets)

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["trajectories_trained"] == 16
    calls = stored_calls(tmp_path / "run")
    # A turn that ends in the middle of a call, or a call without its query, is the model's doing.
    assert {call["status"] for call in calls} <= {"ok", "malformed"}
    answered = [call for call in calls if call["status"] == "ok"]
    assert len(answered) >= 6  # of the stored half of the trajectories, each searches once or more
    for call in answered:
        assert call["text"].startswith(call["arguments"]["query"].upper())
        assert call["version"]
