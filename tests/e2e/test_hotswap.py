"""Tools swapped while a run trains: the short form of `make hotswap`, with every part real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SWAPS = 8
GROUPS = 2
DELAY_S = 5.0
"""A slow tool keeps many trajectories in flight, and the run computes little while tools start."""


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_while_tools_are_swapped(world: Path, tmp_path: Path):
    command = [sys.executable, str(REPOSITORY / "scripts" / "hotswap.py")]
    command += ["--swaps", str(SWAPS), "--groups", str(GROUPS), "--delay-s", str(DELAY_S)]
    command += ["--world", str(world), "--out", str(tmp_path / "hotswap")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "hotswap.json").read_text())
    assert report["swaps"] == SWAPS
    assert report["in_flight_min"] >= 32
    assert report["trajectories"] >= report["steps"] * GROUPS * 8 > 0
    assert (report["lost"], report["failed"], report["pin_violations"]) == (0, 0, 0)
    assert report["versions"] >= 2
    swapped = [swap["swap"] for swap in report["log"]]
    assert {"upgrade", "canary", "rollback", "kill_one"} <= set(swapped)
