"""`env.type = "math"` and `"code"`: when a trajectory ends, and what its calls were worth."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.rollout.config import EnvConfig
from agent_r1.rollout.envs import CallResult, ModelTurn, load_env_class
from agent_r1.rollout.envs.code_env import CodeEnv
from agent_r1.rollout.envs.math_env import MathEnv
from agent_r1.text.reading import parse_turn
from agent_r1_proto.tasks import Task


def turn(text: str = "x", answer: str | None = None) -> ModelTurn:
    return ModelTurn(0, text, thought=None, answer=answer, said=parse_turn(text).said)


def task(**payload: Any) -> Task:
    return Task(id="t", prompt="q", payload=payload)


def ran(passed: int, total: int, **changes: Any) -> CallResult:
    values = {
        "name": "code_tests",
        "arguments": {"code": "x"},
        "status": "ok",
        "text": f"{passed} of {total} tests passed.",
        "data": {"passed": passed, "failed": total - passed, "total": total},
    }
    return CallResult(**(values | changes))


@pytest.mark.parametrize(("name", "found"), [("math", MathEnv), ("code", CodeEnv)])
def test_the_environments_are_named_in_the_configuration(name: str, found: type):
    assert load_env_class(EnvConfig(type=name).type) is found


def test_options_of_another_environment_are_refused():
    assert load_env_class("code", {"improvement_reward"}) is CodeEnv
    with pytest.raises(ValueError, match=r"env\.options \(improvement_reward\) do not fit .*math"):
        load_env_class("math", {"improvement_reward"})
    with pytest.raises(ValueError, match=r"improvement_reward \(inf\) must be a finite number"):
        CodeEnv(task(), improvement_reward=float("inf"))


async def test_a_math_turn_with_calls_goes_on_even_when_it_gives_an_answer():
    step = await MathEnv(task()).step(
        turn(r"\boxed{3}"), [CallResult("python_exec", {}, "ok", "3\n")]
    )
    assert (step.done, list(step.observations)) == (False, ["3\n"])


@pytest.mark.parametrize(
    ("text", "answer", "payload", "reason"),
    [
        (r"so \boxed{3}", None, {}, "answer"),
        (r"so \boxed 3", None, {}, "answer"),
        (r"so \boxedx 3", None, {}, "no_answer"),
        ("so\n#### 3", None, {}, "answer"),
        ("", "3", {}, "answer"),
        ("", " ", {}, "no_answer"),
        ("it is 3", None, {}, "no_answer"),
        ("it is 3", None, {"answer_type": "number"}, "answer"),
        ("<think>3</think> hm", None, {"answer_type": "number"}, "no_answer"),
        (r"<think>\boxed{3}</think> hm", None, {}, "no_answer"),
    ],
)
async def test_a_math_turn_without_calls_ends(
    text: str, answer: str | None, payload: dict[str, Any], reason: str
):
    step = await MathEnv(task(**payload)).step(turn(text, answer), [])
    assert (step.done, step.reason) == (True, reason)


async def test_failing_tests_are_feedback_and_passing_ones_the_end():
    env = CodeEnv(task())
    step = await env.step(turn(), [ran(1, 4)])
    assert (step.done, list(step.observations)) == (False, ["1 of 4 tests passed."])
    assert list(step.process_rewards) == []
    step = await env.step(turn(), [ran(4, 4)])
    assert (step.done, step.reason) == (True, "tests_passed")
    step = await CodeEnv(task()).step(turn(), [])
    assert (step.done, step.reason) == (True, "answer")


async def test_the_last_test_call_of_a_turn_decides_as_it_does_for_the_reward():
    other = CallResult("python_exec", {}, "ok", "1")
    step = await CodeEnv(task()).step(turn(), [ran(4, 4), other, ran(3, 4)])
    assert not step.done
    step = await CodeEnv(task()).step(turn(), [ran(3, 4), ran(4, 4), other])
    assert step.done


async def test_only_a_rise_of_the_best_share_is_paid_and_all_rises_add_up_to_the_reward():
    env = CodeEnv(task(), improvement_reward=0.2)
    other = CallResult("python_exec", {}, "ok", "1")
    refused = ran(4, 4, status="malformed")
    first = await env.step(turn(), [ran(1, 4), other, refused])
    # 0.2 x (1/4 - 0); calls that ran no tests get none
    assert list(first.process_rewards) == [pytest.approx(0.05), None, None]
    worse = await env.step(turn(), [ran(0, 4)])
    assert list(worse.process_rewards) == [0.0]
    again = await env.step(turn(), [ran(1, 4), ran(3, 4)])
    assert list(again.process_rewards) == [0.0, pytest.approx(0.1)]
    last = await env.step(turn(), [ran(4, 4)])
    assert last.done
    assert list(last.process_rewards) == [pytest.approx(0.05)]  # 0.05 + 0.1 + 0.05 = 0.2


@pytest.mark.parametrize("data", [None, {}, {"passed": 5, "total": 4}, {"passed": 0, "total": 0}])
async def test_a_tool_of_that_name_without_counts_is_refused(data: Any):
    with pytest.raises(ValueError, match=r"needs the counts"):
        await CodeEnv(task()).step(turn(), [ran(1, 4, data=data)])
