"""Real HotpotQA questions and passages, where that data is present, as a task of this system.

The suite checks the task, with its search over the real passages; `make test-models` trains on it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent_r1.cli import main as cli
from agent_r1.runs.store import stored_files
from tests.support.runs import finished, steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "multihop_qa"


@pytest.fixture(scope="module")
def options(
    tmp_path_factory: pytest.TempPathFactory, real_data_dir: Path, tiny_base_dir: Path
) -> list[str]:
    """What `smoke.toml` is told of the real data, which has been converted, and of the model."""
    data = tmp_path_factory.mktemp("data")
    for kind, source, name in (
        ("tasks", "train", "train"),
        ("tasks", "dev", "eval"),
        ("corpus", "corpus", "corpus"),
    ):
        file = real_data_dir / f"hotpotqa_{source}.jsonl.gz"
        convert = [sys.executable, str(EXAMPLE / "convert.py"), kind, "--set", "hotpotqa"]
        convert += ["--source", str(file), "--out", str(data / f"hotpotqa_{name}.jsonl")]
        subprocess.run(convert, check=True)
    settings = {
        "model.path": str(tiny_base_dir),
        "data.train": [str(data / "hotpotqa_train.jsonl")],
        "tools.search.corpus": str(data / "hotpotqa_corpus.jsonl"),
        "evaluation.sets.hotpotqa": str(data / "hotpotqa_eval.jsonl"),
        "evaluation.before": False,
        "evaluation.max_questions": 8,
        "learner.steps": 1,
    }
    return [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]


def test_real_questions_and_passages_make_a_task_without_problems(
    options: list[str], capsys: pytest.CaptureFixture[str]
):
    command = ["try", str(EXAMPLE / "smoke.toml"), "--policy", "none", *options]
    assert cli.main(command) == 0, capsys.readouterr().out
    assert "no problems" in capsys.readouterr().out


@pytest.mark.models
@pytest.mark.vllm
def test_smoke_config_trains_on_real_questions_and_reports_scores(
    tmp_path: Path, options: list[str]
):
    run_dir = tmp_path / "run"
    finished("train", EXAMPLE / "smoke.toml", "--run-dir", run_dir, *options, timeout_s=400)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert len(steps(run_dir)) == summary["steps"] == 1
    scores = summary["sets"]["hotpotqa"]["after"]
    # The base has read nothing real: what counts is that every question got a score.
    assert scores["n"] == 8
    assert scores["failed"] == 0
    assert 0.0 <= scores["em"] <= scores["f1"] <= 1.0
    assert set(scores["types"]) <= {"bridge", "comparison"}
    stored = [row for file in stored_files(run_dir) if file.step for row in file.records()]
    searches = [call for row in stored for turn in row["turns"] for call in turn["calls"]]
    assert any(call["status"] == "ok" and call["text"] for call in searches)
