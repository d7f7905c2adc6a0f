"""The short form of scripts/bench_estimate.py: one setting, measured and worked out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_memory_of_the_learner_is_within_a_fifth_of_the_estimate(tmp_path: Path):
    out = tmp_path / "estimate.json"
    script = ROOT / "scripts" / "bench_estimate.py"
    subprocess.run([sys.executable, script, "--only", "reference", "--out", out], check=True)
    (found,) = json.loads(out.read_text())
    for what in ("state", "peak"):
        assert abs(found[f"{what}_error"]) <= 0.2, found


def test_the_committed_report_has_every_setting_within_a_fifth():
    report = json.loads((ROOT / "docs" / "results" / "estimate.json").read_text())
    assert len(report) >= 8
    assert [one["setting"] for one in report if abs(one["peak_error"]) > 0.2] == []
    assert [one["setting"] for one in report if abs(one["state_error"]) > 0.2] == []
