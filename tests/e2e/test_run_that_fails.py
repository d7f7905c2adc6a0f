"""Training runs that end before their time: a launcher killed, a tool that always raises."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.runs import alive, descendants, started, wait_until, write_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
STOP_TIMEOUT_S = 60.0
BROKEN_TOOL = """
from agent_r1 import Tool


class BrokenSearch(Tool):
    name = "search"
    description = "Raises always."
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}

    async def call(self, arguments, context):
        raise KeyError("no such index")
"""


def test_no_process_survives_kill_9_of_the_launcher(
    tmp_path: Path, world: Path, tiny_base_dir: Path
):
    run_dir = tmp_path / "killed"
    config = write_config(tmp_path, run_id="killed", base=tiny_base_dir, world=world)
    with started("train", config, "--run-dir", run_dir) as process:
        wait_until(
            lambda: any("EngineCore" in title for title in descendants(process).values()),
            "the process of vLLM's engine",
            process,
        )
        below = descendants(process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(STOP_TIMEOUT_S)
        wait_until(lambda: not alive(below), "every process to end")
    assert len(below) >= 6  # redis, search, reward, learner, rollout and its engine


def test_a_tool_whose_call_raises_always_stops_the_run_with_the_reason(
    tmp_path: Path, world: Path, tiny_base_dir: Path
):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "broken_tool.py").write_text(BROKEN_TOOL)
    config = write_config(tmp_path, run_id="broken", base=tiny_base_dir, world=world)
    table = config.read_text()
    start, end = table.index("[tools.search]"), table.index("[learner]")
    tool = '[tools.search]\ntype = "broken_tool:BrokenSearch"\n\n'
    config.write_text(table[:start] + tool + table[end:])
    options = {
        "run.plugins": json.dumps([str(tmp_path / "plugins")]),
        "learner.steps": 20,
        "evaluation.every": 0,
        "evaluation.before": "false",
    }
    settings = [f"--set={key}={value}" for key, value in options.items()]
    with started("train", config, "--run-dir", tmp_path / "run", *settings) as process:
        output, _ = process.communicate(timeout=STOP_TIMEOUT_S * 3)
    assert process.returncode != 0, output
    assert "each of the last 32 calls of tool 'search' ended in an error" in output
    assert "KeyError: 'no such index'" in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "tool 'search' ended in an error" in summary["reason"]
    assert "no such index" in (tmp_path / "run" / "logs" / "search.log").read_text()  # traceback
