"""The worked example of docs/add-a-reward.md, run as it stands there."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_r1.learner.algorithms import ADVANTAGES
from agent_r1.learner.config import LearnerConfig, TrainRewardConfig
from agent_r1.learner.objective import PRESETS
from agent_r1.reward.components import ASKING, BUILT_IN, TIMED
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.rollout.config import EnvConfig
from agent_r1.rollout.envs import CallResult, ModelTurn, load_env_class
from agent_r1_proto.rewards import ScoreRequest, ScoreTurn
from agent_r1_proto.tasks import Task

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "add-a-reward.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


def block(language: str) -> str:
    return blocks(language)[0]


def tables_with(name: str) -> list[dict[str, Any]]:
    """Return the configurations that have this table."""
    return [tomllib.loads(text) for text in blocks("toml") if f"[{name}]" in text]


def names_in_table(section: str) -> set[str]:
    text = DOCUMENT.partition(f"## {section}\n")[2].partition("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", text, re.M)
    return set(re.findall(r"`(\w+)`", "".join(first_cells)))


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_rewards.py").write_text(block("python"))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_rewards", None)


def test_the_example_is_short():
    code = [line for line in block("python").splitlines() if line.strip()]
    assert len(code) < 30


@pytest.mark.usefixtures("plugin")
async def test_the_component_of_the_example_scores():
    config = tomllib.loads(block("toml"))
    scorer = Scorer(RewardConfig.model_validate(config["reward"]))
    request = ScoreRequest(payload={"answers": ["Ada"]}, turns=[ScoreTurn(text="x" * 600)])
    reward = await scorer.score(request)
    # 2 - 600 / 400 = 0.5, weight 0.2; no answer; no call was wasted, weight 0.1
    assert reward.components["my_rewards:brevity"] == 0.5
    assert reward.total == pytest.approx(0.2 * 0.5 + 0.1)


@pytest.mark.usefixtures("plugin")
async def test_the_environment_of_the_example_pays_for_new_calls():
    config = tomllib.loads(block("toml"))
    LearnerConfig.model_validate(config["learner"])
    env = load_env_class(EnvConfig.model_validate(config["env"]).type)(Task(id="a", prompt="who?"))
    turn = ModelTurn(number=0, text="", thought=None, answer=None)
    asked = CallResult(name="search", arguments={"query": "a"}, status="ok", text="b")
    failed = CallResult(name="search", arguments={"query": "c"}, status="error", text="d")
    first = await env.step(turn, [asked, failed])
    again = await env.step(turn, [asked])
    assert (first.process_rewards, again.process_rewards) == ([0.1, -0.1], [-0.1])


def test_the_table_lists_every_built_in_component():
    assert names_in_table("Built-in components") == {*BUILT_IN, *TIMED, *ASKING}


def test_the_judge_of_the_example_can_be_built():
    [config] = tables_with("reward.servers.judge")
    assert set(Scorer(RewardConfig.model_validate(config["reward"])).asking) == {"judge"}


def test_the_reward_model_of_the_example_can_be_trained_and_asked():
    [trained], asked = tables_with("train_reward"), tables_with("reward.servers.reward_model")
    TrainRewardConfig.model_validate(trained["train_reward"])
    components = [set(Scorer(RewardConfig.model_validate(one["reward"])).asking) for one in asked]
    assert components == [{"reward_model"}] * 2


def test_the_critic_of_the_example_can_be_asked():
    [config] = tables_with("reward.servers.critic")
    assert set(Scorer(RewardConfig.model_validate(config["reward"])).asking) == {"critic"}


def test_the_table_lists_every_algorithm_that_credits_turns():
    turns = {name for name, kind in ADVANTAGES.items() if kind.credit == "turn"}
    by_turn = {name for name, preset in PRESETS.items() if preset.get("advantage") in turns}
    assert names_in_table("Credit by turn") == by_turn
