"""A short run under a template that removes earlier thinking, and what is done with it then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from agent_r1.runs.store import stored_files
from tests.support.metrics_page import unexplained
from tests.support.runs import finished, set_options, steps, write_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.models, pytest.mark.timeout(900)]
STEPS = 3
TRAJECTORIES = 16
SAID = '(message.content or "")'
FORGETS = f'({SAID} if loop.last else {SAID}.split("</think>")[-1])'


@pytest.fixture(scope="module", params=["grpo", "ppo", "gspo"])
def run(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    world_files: Path,
    tiny_base_dir: Path,
) -> Path:
    folder = tmp_path_factory.mktemp("segments")
    base = folder / "base"
    shutil.copytree(tiny_base_dir, base)
    template = base / "chat_template.jinja"
    kept = template.read_text()
    assert SAID in kept
    template.write_text(kept.replace(SAID, FORGETS))
    config = write_config(folder, run_id=f"segments-{request.param}", base=base, world=world_files)
    options = {
        "env.rewritten_history": "segments",
        "learner.algorithm": request.param,
        "learner.steps": STEPS,
        "learner.importance_cap": 2.0,  # the learner computes log-probabilities before each step
        "evaluation.every": 0,
    }
    finished("train", config, "--run-dir", folder / "run", *set_options(options))
    return folder / "run"


def test_learner_and_rollout_agree_on_every_segment(run: Path):
    lines = steps(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line["batch/segments"] > TRAJECTORIES
        assert line["batch/segments"] == pytest.approx(TRAJECTORIES * line["turns/mean"])
        assert line["logprob/abs_diff_mean"] <= 2e-5
        assert line["logprob/abs_diff_max"] <= 1e-4
        assert line["canary/dlogp_mean"] <= 2e-5
    assert unexplained({name for line in lines for name in line}) == set()


def test_its_trajectories_can_be_read_scored_again_and_exported(run: Path, tmp_path: Path):
    records = [r for file in stored_files(run) if file.step is not None for r in file.records()]
    assert records
    for record in records:
        assert len(record["segment_starts"]) == len(record["turns"]) - 1
    many = [record for record in records if record["segment_starts"]]
    assert f"in {len(many[0]['turns'])} segments" in finished("show", run, "--step", "1")
    assert "reward" in finished("rescore", run, "--config", run.parent / "run.toml")
    finished("export", run, tmp_path / "exported")
    agent = json.loads((tmp_path / "exported" / "agent.json").read_text())
    assert agent["tool_format"] == "hermes"
