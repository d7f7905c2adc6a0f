"""Tools swapped while a run trains: the short form of `make hotswap`, with every part real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SWAPS = 6
GROUPS = 2
WAIT_S = 5.0
"""A slow tool keeps many trajectories in flight, and the run computes little while tools start."""


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_while_tools_are_swapped(world_files: Path, tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks.hotswap", "--swaps", str(SWAPS)]
    command += ["--groups", str(GROUPS), "--wait-s", str(WAIT_S), "--world", str(world_files)]
    # What was in flight at the last swap is trained in them: four batches, of which some are late.
    command += ["--quiet-steps", "4"]
    environment = os.environ | {"BENCH_OUT": str(tmp_path)}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "hotswap.json").read_text())
    (found,) = report["rows"]
    assert found["swaps"] == SWAPS
    assert found["least in flight"] >= 32
    assert found["trained"] >= found["steps"] * GROUPS * 8 > 0
    assert (found["lost"], found["failed for good"], found["pins broken"]) == (0, 0, 0)
    assert found["versions"] >= 2
    swapped = [swap["swap"] for swap in report["log"]]
    assert {"upgrade", "canary", "rollback", "kill_one"} <= set(swapped)
