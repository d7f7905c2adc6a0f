"""The tools, the environment, the reward and the scripted policies of examples/deep_world."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_r1 import ToolEnv
from agent_r1.cli.task.scripted import play_all
from agent_r1.config.checks import use_plugins
from agent_r1.config.run import Config, load_config
from agent_r1.rollout.envs import CallResult, EnvStep, ModelTurn
from agent_r1.runtime.files.tasks import read_task_file
from agent_r1.tools.base import CallContext
from agent_r1_proto.rewards import ScoreCall, ScoreRequest, ScoreTurn
from agent_r1_proto.tasks import Task
from tests.support.builders import read_turn

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "deep_world"
OFFLINE = {"unavailable": True}


def a_task(budget: int = 2) -> Task:
    payload: Any = {
        "answers": ["Belan Abrak I"],
        "budget": budget,
        "facts": ["K01.001", "K01.002"],
        "plan": {"starts": ["Belan Abrak I"], "relations": ["mother"], "order": ""},
    }
    return Task(id="a", prompt="Name the mother.", payload=payload)


def read(entry: str, data: Any = None) -> CallResult:
    return CallResult("read", {"id": f" {entry}"}, "ok", " text", data)


def react(env: ToolEnv, *results: CallResult) -> EnvStep:
    turn = ModelTurn(number=0, text="", thought=None, answer=None)
    return asyncio.run(env.step(turn, results))


def test_calls_are_unavailable_as_often_as_configured(deep_world: SimpleNamespace):
    ids = [f"run/1/{group}/{sample}/0" for group in range(250) for sample in range(8)]
    drawn = [deep_world.catalogue.is_unavailable(i, turn, 0.15) for i in ids for turn in range(5)]
    # 10,000 draws: the standard error of the share is sqrt(.15 x .85 / 10000) = .0036
    assert sum(drawn) / len(drawn) == pytest.approx(0.15, abs=0.015)


def test_a_repeated_evaluation_meets_the_same_unavailable_calls(deep_world: SimpleNamespace):
    def drawn(run: str) -> list[bool]:
        ids = [f"{run}/0/{group}/0/0" for group in range(200)]
        return [deep_world.catalogue.is_unavailable(i, 0, 0.5) for i in ids]

    assert drawn("deep-world-client-12") == drawn("other/run")
    assert True in drawn("run")
    assert False in drawn("run")


def test_an_unavailable_tool_is_a_result_and_the_next_call_is_drawn_anew(
    deep_world: SimpleNamespace, deep_world_files: Path
):
    tool = deep_world.catalogue.CatalogueRead(str(deep_world_files), unavailable_share=0.5)
    tool.load()

    def ask(turn: int) -> Any:
        context = CallContext("run/1/0/0/0", turn, None, timeout_s=1.0)
        return asyncio.run(tool.call({"id": " K00.000"}, context))

    texts = {ask(turn).text() for turn in range(20)}
    assert texts == {" unavailable, try again", " no entry"}


def test_the_call_that_exceeds_the_budget_ends_the_interaction(deep_world: SimpleNamespace):
    env = deep_world.catalogue.CatalogueEnv(a_task(budget=2))
    assert not react(env, read("K05.001")).done
    assert not react(env, read("K05.002", OFFLINE)).done
    assert not react(env, read("K05.002")).done
    step = react(env, read("K05.003"))
    assert (step.done, step.reason) == (True, "over_budget")


def test_a_right_answer_over_budget_is_worth_nothing(deep_world: SimpleNamespace):
    def score(*data: Any) -> float:
        calls = [ScoreCall(tool="read", data=item) for item in data]
        turns = [
            ScoreTurn(text="", num_calls=len(calls), calls=calls),
            read_turn("<answer> Belan Abrak I</answer>"),
        ]
        request = ScoreRequest(payload=a_task(budget=2).payload, turns=turns)
        return deep_world.catalogue.right_within_budget(request)

    assert score(None, None) == 1.0
    assert score(None, None, OFFLINE) == 1.0
    assert score(None, None, None) == 0.0


def test_states_are_equal_where_the_same_is_known_and_left(deep_world: SimpleNamespace):
    def state(*results: CallResult) -> str:
        env = deep_world.catalogue.CatalogueEnv(a_task(budget=5))
        return [react(env, result).state_key for result in results][-1]

    assert state(read("K05.001"), read("K05.002")) == state(read("K05.002"), read("K05.001"))
    assert state(read("K05.001")) != state(read("K05.002"))
    assert state(read("K05.001")) != state(read("K05.001"), read("K05.001"))
    assert state(read("K05.001")) != state(read("K05.001"), read("K05.002", OFFLINE))


def test_facts_are_rewarded_once_and_only_where_asked_for(deep_world: SimpleNamespace):
    env = deep_world.catalogue.CatalogueEnv(a_task(budget=9), fact_reward=1.0)
    rewards = [react(env, read(i)).turn_reward for i in ("K01.001", "K01.001", "K09.009")]
    # Two entries lead to the answer, so each is worth 1 / 2.
    assert rewards == [0.5, 0.0, 0.0]
    silent = deep_world.catalogue.CatalogueEnv(a_task(budget=9))
    assert react(silent, read("K01.001")).turn_reward is None


@pytest.fixture(scope="module")
def config(deep_world_files: Path) -> Config:
    options = [f"tools.{name}.settings.data={deep_world_files}" for name in ("search", "read")]
    return load_config(EXAMPLE / "run.toml", options).config


def test_only_the_oracle_is_always_right(config: Config, deep_world_files: Path):
    use_plugins(config)
    oracle = config.diagnose.oracle
    assert oracle is not None
    policies = {"oracle": oracle, **config.diagnose.degenerate}
    tasks = read_task_file(deep_world_files / "eval_in_domain.jsonl")
    scores = play_all(config, policies, {"in_domain": tasks})
    means = {name: sum(of["in_domain"]) / len(tasks) for name, of in scores.items()}
    assert means.pop("oracle") == 1.0
    assert len(means) == 12
    assert max(means.values()) <= 0.5
    assert means["never_retries"] > 0.2  # it is not right by luck alone
