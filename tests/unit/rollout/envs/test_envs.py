"""How an environment is named and what it must look like."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from agent_r1.rollout.config import EnvConfig
from agent_r1.rollout.envs import CallResult, ModelTurn, ToolEnv, load_env_class
from agent_r1_proto.tasks import Task

TURN = ModelTurn(number=0, text="x", thought=None, answer=None)

USER_MODULE = '''
from dataclasses import replace
from agent_r1 import ToolEnv

class Bonus(ToolEnv):
    """Rewards every call that found something."""

    def __init__(self, task, bonus):
        super().__init__(task)
        self.bonus = bonus

    async def step(self, turn, results):
        step = await super().step(turn, results)
        rewards = [self.bonus if result.status == "ok" else 0.0 for result in results]
        return replace(step, process_rewards=rewards)

class NotAnEnv:
    pass

class Blocking(ToolEnv):
    def step(self, turn, results):
        return None

class Greedy(ToolEnv):
    async def step(self, turn):
        return None
'''


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"user_env_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


async def test_users_environment_is_loaded_by_name_with_its_options(user_module: str):
    found = load_env_class(f"{user_module}:Bonus", {"bonus"})
    env = found(Task(id="t", prompt="q"), **{"bonus": 0.25})
    step = await env.step(TURN, [CallResult("search", {}, "ok", "page")])
    assert (step.observations, step.process_rewards, step.done) == (["page"], [0.25], False)


async def test_default_environment_ends_at_a_turn_without_calls():
    env = load_env_class("tool")(Task(id="t", prompt="q"))
    assert type(env) is ToolEnv
    step = await env.step(TURN, [])
    assert (step.done, step.reason) == (True, "answer")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such_module:Env", set(), r"cannot be imported.*run\.plugins"),
        ("{module}:Missing", set(), "has no Missing"),
        ("{module}:NotAnEnv", set(), "must be a subclass of"),
        ("{module}:Blocking", set(), "step is not async; write `async def step"),
        (
            "{module}:Greedy",
            set(),
            r"cannot be called: .*write `async def step\(self, turn, results",
        ),
        ("{module}:Bonus", set(), "'bonus'"),
        ("{module}:Bonus", {"bonus", "malus"}, "'malus'"),
    ],
)
def test_wrong_environments_say_what_to_change(
    user_module: str, name: str, options: set[str], message: str
):
    with pytest.raises(ValueError, match=message):
        load_env_class(name.format(module=user_module), options)


def test_options_without_an_own_class_are_refused():
    with pytest.raises(ValidationError, match="name your own class"):
        EnvConfig(options={"bonus": 1})


@pytest.mark.parametrize("name", ["Tool", "module", "module:", ":Name", "a b:C"])
def test_misspelt_types_are_refused(name: str):
    with pytest.raises(ValidationError):
        EnvConfig(type=name)
