"""A short run of an agent that was not written for training, with real services, model and learner.

The agent is a program with an HTTP client (examples/any_agent/raw_client.py). `make demo-agent`
trains one on openai-agents in the same way, with 50 steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.runs import finished, set_options, steps, write_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
AGENT = Path(__file__).resolve().parents[2] / "examples" / "any_agent" / "raw_client.py"
STEPS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, world_files: Path, tiny_base_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    config = write_config(folder, run_id="agent", base=tiny_base_dir, world=world_files)
    with config.open("a") as file:
        file.write(
            f'\n[agent]\ncommand = ["{sys.executable}", "{AGENT}"]\nanswer = "output"\n'
            "timeout_s = 120\nmax_session_tokens = 4096\n"
        )
    options: dict[str, object] = {"learner.steps": STEPS, "evaluation.every": 0}
    finished("train", config, "--run-dir", folder / "run", *set_options(options))
    return folder / "run"


def test_learner_and_rollout_agree_on_what_an_agent_was_told(run: Path):
    lines = steps(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line["turns/mean"] > 1
        assert line["logprob/abs_diff_mean"] <= 2e-5
        assert line["logprob/abs_diff_max"] <= 1e-4


def test_its_trajectories_are_shown_with_what_the_tools_answered(run: Path):
    shown = finished("show", run)
    assert "<tool_call>" in shown
    assert "tool<" in shown
    assert "reward" in shown
