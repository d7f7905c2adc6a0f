"""The page a reader starts with runs: sample, call, score, advantage, loss, push in one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import write_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PAGE = Path(__file__).resolve().parents[2] / "examples" / "minimal_loop.py"
TIMEOUT_S = 240
MOST_LINES = 150


def test_it_is_one_page():
    assert len(PAGE.read_text().splitlines()) <= MOST_LINES


def test_it_trains(tmp_path: Path, tiny_base_dir: Path, world_files: Path):
    config = write_config(tmp_path, run_id="minimal", base=tiny_base_dir, world=world_files)
    command = [sys.executable, str(PAGE), str(config)]
    command += ["--steps", "2", "--questions", "4", "--group-size", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)

    assert done.returncode == 0, done.stdout + done.stderr
    steps = re.findall(r"^step (\d)/2  reward ([\d.]+)", done.stdout, re.M)
    assert [number for number, _ in steps] == ["1", "2"]
    assert any(float(reward) > 0 for _, reward in steps)
    assert "Exception ignored" not in done.stderr  # the engine has been collected, not torn down
