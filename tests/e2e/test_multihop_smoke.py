"""The whole system on real HotpotQA questions and passages, where that data is present."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import finished, steps

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "multihop_qa"


def test_smoke_config_trains_on_real_questions_and_reports_scores(
    tmp_path: Path, real_data_dir: Path, tiny_base_dir: Path
):
    data = tmp_path / "data"
    convert = [sys.executable, str(EXAMPLE / "convert.py"), "repacked"]
    subprocess.run([*convert, "--data", str(real_data_dir), "--out", str(data)], check=True)
    run_dir = tmp_path / "run"
    settings = {
        "model.path": str(tiny_base_dir),
        "data.train": [str(data / "hotpotqa_train.jsonl")],
        "tools.search.corpus": str(data / "hotpotqa_corpus.jsonl"),
        "evaluation.sets.hotpotqa": str(data / "hotpotqa_eval.jsonl"),
    }
    options: list[str] = []
    for key, value in settings.items():
        options += ["--set", f"{key}={json.dumps(value)}"]
    finished("train", EXAMPLE / "smoke.toml", "--run-dir", run_dir, *options, timeout_s=400)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert len(steps(run_dir)) == summary["steps"] == 2
    scores = summary["sets"]["hotpotqa"]["after"]
    # The base has read nothing real: what counts is that every question got a score.
    assert scores["n"] == 16
    assert scores["failed"] == 0
    assert 0.0 <= scores["em"] <= scores["f1"] <= 1.0
    assert set(scores["types"]) <= {"bridge", "comparison"}
    stored = [
        json.loads(line)
        for path in sorted((run_dir / "trajectories").glob("step_*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    searches = [call for row in stored for turn in row["turns"] for call in turn["calls"]]
    assert any(call["status"] == "ok" and call["text"] for call in searches)
