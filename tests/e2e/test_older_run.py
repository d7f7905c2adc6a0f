"""A run folder that version 0.1.0 wrote continues in this version.

`tests/contract/run_0_1_0` is such a folder with its model, tasks and reward: four steps of a tiny
random model. Paths in it begin with RUN_0_1_0, which stands for where it lies.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.runs import agent_r1

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

OLD = Path(__file__).resolve().parents[1] / "contract" / "run_0_1_0"
TIMEOUT_S = 240


def test_a_run_of_version_0_1_0_goes_on(tmp_path: Path):
    folder = tmp_path / "old"
    shutil.copytree(OLD, folder)
    config = folder / "run" / "config.json"
    config.write_text(config.read_text().replace("RUN_0_1_0", str(folder)))

    command = agent_r1("train", "--resume", folder / "run", "--set", "learner.steps=6")
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)

    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((folder / "run" / "summary.json").read_text())
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    # 4 steps of 2 groups of 2 were trained before, 2 more now; version 4 was the last.
    assert (summary["status"], summary["steps"], summary["starts"]) == ("finished", 6, 2)
    assert summary["trajectories_trained"] == 24
    assert summary["policy_version"] > 4
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
