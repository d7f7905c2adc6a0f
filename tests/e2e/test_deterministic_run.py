"""`run.deterministic`: the same configuration twice gives the same tokens and the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import finished, steps, write_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
TOLERANCE = 1e-5
STEPS = 3
# What a clock or a queue says differs between any two runs.
OF_TIME = ("time/", "throughput/", "push/", "queue/", "learn/tokens_per_s", "tools/latency")


def numbers(folder: Path) -> list[dict[str, float]]:
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(OF_TIME) and "latency" not in name
        }
        for line in steps(folder)
    ]


def tokens(folder: Path) -> dict[str, str]:
    """Digest of the tokens of every trajectory, by key."""
    lines: list[dict[str, Any]] = [
        json.loads(line)
        for file in sorted((folder / "trajectories").glob("step_*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    return {line["rollout_id"]: line["token_digest"] for line in lines}


def test_two_deterministic_runs_are_the_same_run(tmp_path: Path, world: Path, tiny_base_dir: Path):
    config = write_config(tmp_path, run_id="repeat", base=tiny_base_dir, world=world)
    options = {
        "run.deterministic": "true",
        "learner.algorithm": "ppo",  # policy, critic and reference
        "learner.kl": "reward",
        "learner.steps": STEPS,
        "learner.group_size": 2,
        "learner.trajectories_per_step": 8,
        "learner.checkpoint_every": 0,
        "evaluation.every": 0,
        "evaluation.before": "false",
        "evaluation.after": "false",
    }
    settings = [f"--set={key}={value}" for key, value in options.items()]
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        finished("train", config, "--run-dir", folder, *settings)
    first, second = (tokens(folder) for folder in folders)
    assert len(first) == STEPS * 8
    assert first == second
    for one, other in zip(*(numbers(folder) for folder in folders), strict=True):
        assert one == pytest.approx(other, abs=TOLERANCE, rel=TOLERANCE)
        assert one["value/mean"] != 0.0 or one["step"] == 1
    assert len(numbers(folders[0])) == STEPS
