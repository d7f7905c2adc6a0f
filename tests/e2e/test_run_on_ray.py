"""A short run on a Ray cluster of one node; `make test-ray` has the long one, with three.

Its tool is an MCP server's, which runs Python in the sandbox.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_r1.runs.store import stored_files
from tests.support.runs import agent_r1, set_options, started, wait_until, write_config
from tests.support.sockets import free_port

pytestmark = pytest.mark.vllm

END_TIMEOUT_S = 400.0
IN_SANDBOX = """
from agent_r1.tools.sandbox.python_exec import PythonExec


class Shout(PythonExec):
    name = "search"
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}

    async def call(self, arguments, context):
        return await super().call({"code": f"print({arguments['query']!r}.upper())"}, context)
"""


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give Ray a folder of its own, whose name is short enough for the sockets in it."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.setenv("HOME", str(folder))
    yield folder
    shutil.rmtree(folder)


def replace_search(config: Path, table: str) -> None:
    """Put another [tools.search] into a file of `write_config`."""
    before, _, rest = config.read_text().partition("[tools.search]")
    config.write_text(f"{before}{table}\n[learner]{rest.partition('[learner]')[2]}")


def write_mcp_config(folder: Path, **places: Any) -> Path:
    """Write a run whose tool comes from `agent-r1 tools mcp`, and what that serves."""
    served = write_config(folder / "served", **places)
    (folder / "shout.py").write_text(IN_SANDBOX)
    served.write_text(served.read_text().replace("[run]", f'[run]\nplugins = ["{folder}"]'))
    replace_search(served, '[tools.search]\ntype = "shout:Shout"\n')
    config = write_config(folder, **places)
    settings = json.dumps(agent_r1("tools", "mcp", served, "search"))
    table = f'type = "mcp"\n[tools.search.settings]\ntool = "search"\ncommand = {settings}\n'
    replace_search(config, f"[tools.search]\n{table}")
    return config


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_trains_every_sample_once_and_leaves_nothing(
    tmp_path: Path,
    redis_url: str,
    run_id: str,
    tiny_base_dir: Path,
    world_files: Path,
    ray_folder: Path,
):
    places = {"run_id": run_id, "base": tiny_base_dir, "world": world_files}
    config = write_mcp_config(tmp_path / "job", **places)
    folder, port = tmp_path / "run", free_port()
    options = {
        "redis.url": redis_url,
        "run.dir": folder,
        "ray.api_port": port,
        "rollout.kv_cache_gib": 0.25,
        "learner.steps": 2,
        "learner.groups_per_batch": 2,
        "evaluation.before": "false",
        "evaluation.after": "false",
        "evaluation.every": 100,
    }
    with started("ray", "up", config, *set_options(options)) as process:
        health = f"http://127.0.0.1:{port}/{run_id}/search/healthz"
        answers: list[dict[str, object]] = []
        wait_until(lambda: answers_now(health, answers), "an answer of search", process)
        output, _ = process.communicate(timeout=END_TIMEOUT_S)
    assert process.returncode == 0, output
    assert answers[0]["name"] == "search"  # Serve's proxy reaches the service
    assert "step 2/2" in output  # the job's log is followed
    files = [file for file in stored_files(folder) if file.step is not None]
    trained = [record for file in files for record in file.records()]
    samples = sorted((one["group_id"], one["sample_index"]) for one in trained if one["trained"])
    # 2 steps of 2 groups of 4 samples.
    assert samples == [(group, sample) for group in range(4) for sample in range(4)]
    calls = [call for one in trained for turn in one["turns"] for call in turn["calls"]]
    # A turn that ends in the middle of a call, or a call without its query, is the model's doing.
    assert {call["status"] for call in calls} <= {"ok", "malformed"}
    answered = [call for call in calls if call["status"] == "ok"]
    assert len(answered) >= 6  # of 16 trajectories; most of them search
    for call in answered:
        assert call["text"].startswith(call["arguments"]["query"].upper())
    with pytest.raises(httpx.ConnectError):
        httpx.get(health, trust_env=False)


def answers_now(url: str, answers: list[dict[str, object]]) -> bool:
    """Ask a URL; add what it answers with 200 to the answers, and say whether it did."""
    with suppress(httpx.HTTPError):
        answer = httpx.get(url, trust_env=False)
        if answer.status_code == httpx.codes.OK:
            answers.append(answer.json())
    return bool(answers)
