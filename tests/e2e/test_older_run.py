"""Run folders that older versions wrote continue in this version, and are shown and scored.

`tests/contract/run_0_1_0`, `run_before_lineages` and `run_config_version_1` are such folders with
their model, tasks and reward: four steps of a tiny random model. The second is of the last version
whose turns did not say what they are; `searches.jsonl` has two trajectories of it that search. The
third is of the last version whose configuration had the keys of version 1. Paths in them begin with
a word that stands for where they lie.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from agent_r1.cli import main as cli
from tests.support.runs import agent_r1

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CONTRACT = Path(__file__).resolve().parents[1] / "contract"
TIMEOUT_S = 240


def old_run(name: str, word: str, folder: Path) -> Path:
    """Copy a run of an older version, and return its run folder."""
    shutil.copytree(CONTRACT / name, folder)
    config = folder / "run" / "config.json"
    config.write_text(config.read_text().replace(word, str(folder)))
    return folder / "run"


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("run_0_1_0", "RUN_0_1_0"),
        ("run_before_lineages", "OLD_RUN"),
        ("run_config_version_1", "OLD_RUN"),
    ],
)
def test_an_older_run_goes_on(tmp_path: Path, name: str, word: str):
    run = old_run(name, word, tmp_path / "old")

    command = agent_r1("train", "--resume", run, "--set", "learner.steps=6")
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)

    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run / "summary.json").read_text())
    lines = (run / "metrics.jsonl").read_text().splitlines()
    # 4 steps of 2 groups of 2 were trained before, 2 more now; version 4 was the last.
    assert (summary["status"], summary["steps"], summary["starts"]) == ("finished", 6, 2)
    assert summary["trajectories_trained"] == 24
    assert summary["policy_version"] > 4
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_trajectories_of_a_version_that_read_no_turns_are_shown_and_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = old_run("run_before_lineages", "OLD_RUN", tmp_path / "old")
    shutil.copy(tmp_path / "old" / "searches.jsonl", run / "trajectories" / "step_000004.jsonl")

    assert cli.main(["show", str(run)]) == 0
    assert "model> <think> plan Ashstow Water" in capsys.readouterr().out

    weights = "exact_match=0.0,format=1.0,reasoning_format=0.0"
    out = tmp_path / "scores.jsonl"
    options = ["--set", f"reward.components={{{weights}}}", "--out", str(out)]
    assert cli.main(["rescore", str(run), *options]) == 0
    (after, _) = [json.loads(line)["after"] for line in out.read_text().splitlines()]
    # As the version that stored them scored them.
    assert after["prediction"] == "Belok Ebrak"
    assert after["components"] | {"format": 1.0, "reasoning_format": 1.0} == after["components"]


def test_a_run_with_keys_of_an_older_version_is_shown_scored_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = old_run("run_config_version_1", "OLD_RUN", tmp_path / "old")
    assert cli.main(["show", str(run)]) == 0
    assert "vowels:share" in capsys.readouterr().out
    options = ["--set", "reward.components={answered=1.0}", "--out", str(tmp_path / "scores.jsonl")]
    assert cli.main(["rescore", str(run), *options]) == 0

    out = tmp_path / "answers.jsonl"
    command = agent_r1("evaluate", run / "config.json", "--policy", run, "--out", out)
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(out.read_text().splitlines()) == 8  # tasks


@pytest.mark.parametrize("name", ["run_before_lineages", "run_config_version_1"])
def test_a_checkpoint_of_an_older_version_is_exported(tmp_path: Path, name: str):
    run = old_run(name, "OLD_RUN", tmp_path / "old")
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
