"""The main job with every real part: vLLM, HTTP search, Redis, reward, DeepSpeed, weight pushes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import (
    alive,
    descendants,
    finished,
    processes_naming,
    started,
    steps,
    wait_until,
    write_config,
)
from tests.support.sockets import is_exposed, listening

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
REPOSITORY = Path(__file__).resolve().parents[2]
STOP_TIMEOUT_S = 60.0
SOCKETS_FILE = "sockets.json"
"""Beside the run: what listened while it trained, and whether other machines could use it."""
SUMMARY_FIELDS = {
    "algorithm",
    "steps",
    "seed",
    "wall_s",
    "em_before",
    "em_after",
    "sets",
    "reward_before",
    "reward_after",
    "components_before",
    "components_after",
    "calls_before",
    "calls_after",
    "trajectories_trained",
    "sampled_tokens",
    "tokens_per_s",
    "step_s",
    "rollout_s",
    "reward_s",
    "learn_s",
    "push_s",
    "max_staleness_seen",
    "canary_max_dlogp",
}


@pytest.fixture(scope="module")
def resumed_run(tmp_path_factory: pytest.TempPathFactory, world: Path, tiny_base_dir: Path) -> Path:
    """A run whose rollout server is killed with SIGKILL, which is then stopped by Ctrl-C, resumed,
    and goes to its end: the folder it leaves."""
    folder = tmp_path_factory.mktemp("runs")
    run_dir = folder / "run"
    config = write_config(folder, run_id="e2e", base=tiny_base_dir, world=world)
    open_to_others = ("rollout.host=0.0.0.0", "rollout.advertise_host=127.0.0.1")
    options = [word for option in open_to_others for word in ("--set", option)]
    with started("train", config, "--run-dir", run_dir, *options) as process:
        wait_until(lambda: len(steps(run_dir)) >= 1, "the first step", process)
        [server] = [
            pid
            for pid, command in processes_naming(str(run_dir)).items()
            if re.search(r"agent-r1 serve rollout|serve rollout", command)
            and "subreaper" not in command
        ][:1]
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: len(steps(run_dir)) >= 3, "a step after the kill", process)
        below = descendants(process)
        sockets = [
            {"socket": f"{address}:{port} {below[pid]}", "exposed": is_exposed(address, port)}
            for address, port, pid in listening(below)
        ]
        (folder / SOCKETS_FILE).write_text(json.dumps(sockets))
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=STOP_TIMEOUT_S)
    assert "--resume" in output
    assert alive(below) == []
    finished("train", "--resume", run_dir, "--set", "learner.steps=6")
    return run_dir


def test_every_step_is_there_once_after_kill_stop_and_resume(resumed_run: Path):
    assert [line["step"] for line in steps(resumed_run)] == [1, 2, 3, 4, 5, 6]


def test_policy_versions_only_rise_and_are_never_used_twice(resumed_run: Path):
    versions = [line["policy/version"] for line in steps(resumed_run)]
    assert versions == sorted(set(versions))


def test_other_machines_reach_nothing_without_the_token(resumed_run: Path):
    sockets = json.loads((resumed_run.parent / SOCKETS_FILE).read_text())
    # Redis, search, reward, rollout: the least that listens.
    assert len(sockets) >= 4
    assert [one for one in sockets if one["socket"].startswith("0.0.0.0:")]  # rollout
    assert [one["socket"] for one in sockets if one["exposed"]] == []


def test_nothing_is_left_running(resumed_run: Path):
    assert processes_naming(str(resumed_run)) == {}


def test_summary_has_every_field_and_they_agree(resumed_run: Path):
    summary = json.loads((resumed_run / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_FIELDS
    assert summary["steps"] == 6
    assert summary["trajectories_trained"] == 6 * 4 * 4
    assert summary["max_staleness_seen"] == 0
    in_domain = [summary["sets"][name] for name in ("hotpot_like", "wiki2_like")]
    for when in ("before", "after"):
        mean = sum(scores[when]["em"] for scores in in_domain) / 2
        assert summary[f"em_{when}"] == pytest.approx(mean)
        assert all(scores[when]["n"] == 12 for scores in in_domain)


def test_learner_and_rollout_agree_on_log_probabilities_after_every_push(resumed_run: Path):
    # The canary judges the mean; one token alone is rarely off by more than 1e-4 in float32.
    assert json.loads((resumed_run / "summary.json").read_text())["canary_max_dlogp"] <= 5e-4
    assert all(line["logprob/abs_diff_mean"] <= 1e-5 for line in steps(resumed_run))
    assert all(line["logprob/abs_diff_max"] <= 5e-4 for line in steps(resumed_run))


def test_the_run_folder_holds_what_a_user_looks_for(resumed_run: Path):
    assert list((resumed_run / "tensorboard").glob("events.*"))
    assert list((resumed_run / "trajectories").glob("*.jsonl"))
    config = json.loads((resumed_run / "config.json").read_text())
    assert config["learner"]["group_size"] == 4
    newest = max((resumed_run / "checkpoints").glob("step_*"))
    assert (newest / "model" / "config.json").is_file()
    assert {path.name for path in (resumed_run / "logs").iterdir()} >= {
        "learner.log",
        "rollout.log",
        "reward.log",
        "search.log",
    }


def test_the_first_prompt_is_in_the_log_in_full(resumed_run: Path):
    log = (resumed_run / "logs" / "rollout.log").read_text()
    assert re.search(r"first prompt .*\n(.*\n)*?<\|im_start\|>", log)


def test_show_prints_a_stored_trajectory(resumed_run: Path):
    printed = finished("show", resumed_run, "--step", 6, "--limit", 1)
    assert "search" in printed
    assert "reward" in printed


def test_a_used_run_folder_is_refused_and_resume_named(resumed_run: Path):
    done = subprocess.run(
        [
            Path(sys.executable).with_name("agent-r1"),
            "train",
            resumed_run.parent / "run.toml",
            "--run-dir",
            resumed_run,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert f"--resume {resumed_run}" in done.stderr


def test_evaluate_scores_the_run_as_its_last_evaluation_did(resumed_run: Path, tmp_path: Path):
    out = tmp_path / "scores.jsonl"
    finished("evaluate", resumed_run.parent / "run.toml", "--policy", resumed_run, "--out", out)
    summary = json.loads((resumed_run / "summary.json").read_text())
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for name in ("hotpot_like", "wiki2_like"):
        scores = [row["components"]["exact_match"] for row in rows if row["set"] == name]
        assert len(scores) == 12
        # Greedy answers of the same weights; batch shapes differ, so one answer may flip.
        assert sum(scores) / 12 == pytest.approx(
            summary["sets"][name]["after"]["em"], abs=1.01 / 12
        )
