"""What the environment of a task says after a turn: rewards, messages, the end, and faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agent_r1.rollout.envs import CallResult, EnvStep, ModelTurn, ToolEnv
from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tasks import Task
from agent_r1_proto.tools import ToolCall, ToolResult
from tests.support.builders import rollout_task
from tests.support.fakes import (
    FakeToolServer,
    call_text,
)
from tests.unit.rollout.loops import ANSWER, agent_loop


class Scored(ToolEnv):
    """Rewards calls, stops after the tool says so."""

    def __init__(self, task: Task, bonus: float = 0.5) -> None:
        super().__init__(task)
        self.bonus = bonus
        self.closed = False

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        step = await super().step(turn, results)
        found = [self.bonus if result.data == "hit" else None for result in results]
        missed = sum(result.data == "miss" for result in results)
        key = f"{missed} missed \ud83d"
        step = replace(step, process_rewards=found, turn_reward=-missed, state_key=key)
        if any(result.data == "goal" for result in results):
            return replace(step, done=True, reason="goal")
        return step


async def test_environment_rewards_calls_and_ends_the_trajectory(chat: ChatFormat, end_id: int):
    def answer(call: ToolCall) -> ToolResult:
        return ToolResult(parts=[TextPart(text="x")], data=call.arguments["query"])

    async with (
        FakeToolServer(answer=answer) as server,
        agent_loop(
            chat,
            end_id,
            [call_text(query="hit") + call_text(query="miss"), call_text(query="goal")],
            server,
            make_env=Scored,
        ) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "goal")
    assert [call.process_reward for call in trajectory.calls()] == [0.5, None, None]
    assert [turn.process_reward for turn in trajectory.turns] == [-1.0, 0.0]
    # Where the first turn led, half a surrogate pair replaced.
    keys = [turn.state_key for turn in trajectory.turns]
    assert keys == ["", "1 missed \N{REPLACEMENT CHARACTER}"]


class Insisting(ToolEnv):
    """Asks again, once, when the model answers without a call."""

    sends_messages = True

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        if turn.number == 0:
            return EnvStep(message="Are you sure?")
        return await super().step(turn, results)


async def test_environment_may_speak_as_the_user(tokenizer: Any, end_id: int):
    chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id], reply_roles=("tool", "user"))
    async with agent_loop(chat, end_id, [ANSWER], make_env=Insisting) as built:
        trajectory = await built.loop.run(rollout_task())
    assert trajectory.status == "COMPLETED"
    assert chat.decode(trajectory.token_ids.tolist()).endswith(
        f"{ANSWER}<|im_end|>\n<|im_start|>user\nAre you sure?<|im_end|>\n"
        f"<|im_start|>assistant\n{ANSWER}<|im_end|>"
    )


async def test_the_environment_gets_the_answer_that_the_pattern_finds(
    chat: ChatFormat, end_id: int
):
    seen: list[str | None] = []

    class Listening(ToolEnv):
        async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
            seen.append(turn.answer)
            return await super().step(turn, results)

    env = {"answer_pattern": r"Answer: (\w+)"}
    for text in ("Answer: no. Answer: yes.", ANSWER):
        async with agent_loop(chat, end_id, [text], env=env, make_env=Listening) as built:
            await built.loop.run(rollout_task())
    assert seen == ["yes", None]


class Broken(ToolEnv):
    """Raises."""

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        raise KeyError("goal")


class Unmade(ToolEnv):
    """Cannot be made."""

    def __init__(self, task: Task) -> None:
        raise LookupError("no goal \ud800")


def returning(step: Any) -> type[ToolEnv]:
    """Return an environment whose steps are all this one."""

    class Mine(ToolEnv):
        async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> Any:
            return step

    return Mine


@pytest.mark.parametrize(
    ("make_env", "reason"),
    [
        (Broken, "Broken.step raised KeyError: 'goal'"),
        (Unmade, "Unmade(...) raised LookupError: no goal \N{REPLACEMENT CHARACTER}"),
        (returning(EnvStep()), "Mine.step returned nothing to continue with after a turn"),
        (returning(None), "Mine.step returned None; it must return an EnvStep"),
        (returning({"done": True}), "Mine.step returned dict ({'done': True}); it must return an"),
        (
            returning(EnvStep(done=True, process_rewards=[1.0])),
            "Mine.step returned 1 process rewards for 0 calls; return one per call, or none",
        ),
        (
            returning(EnvStep(done=True, process_rewards=[float("nan")])),
            "Mine.step returned process_rewards = [nan]; they must be a list of finite numbers",
        ),
        (
            returning(EnvStep(done=True, process_rewards=0.5)),  # type: ignore[arg-type]
            "Mine.step returned process_rewards = 0.5; they must be a list",
        ),
        (
            returning(EnvStep(done=True, turn_reward=float("inf"))),
            "Mine.step returned turn_reward = inf; it must be a finite number or None",
        ),
        (
            returning(EnvStep(done=True, turn_reward=10**400)),
            "Mine.step returned turn_reward = 1000",
        ),
        (
            returning(EnvStep(done=True, state_key=("a", 1))),  # type: ignore[arg-type]
            "Mine.step returned state_key = ('a', 1); it must be a text",
        ),
        (
            returning(EnvStep(observations="found")),
            "Mine.step returned observations = 'found'; they must be a list of texts",
        ),
        (
            returning(EnvStep(done=1)),  # type: ignore[arg-type]
            "Mine.step returned done = 1; it must be True or False",
        ),
        (
            returning(EnvStep(message=b"on")),  # type: ignore[arg-type]
            "Mine.step returned message = b'on'; it must be a text (or a list of parts) or None",
        ),
    ],
)
async def test_environment_that_fails_fails_the_attempt(
    chat: ChatFormat,
    end_id: int,
    make_env: Any,
    reason: str,
    caplog: pytest.LogCaptureFixture,
):
    async with agent_loop(chat, end_id, [ANSWER], make_env=make_env) as built:
        trajectory = await built.loop.run(rollout_task())
    assert trajectory.status == "FAILED"
    assert trajectory.reason.startswith(f"env_error: {reason}")
    assert any(record.exc_info for record in caplog.records)  # the traceback is in the log


async def test_half_a_surrogate_pair_of_an_environment_is_replaced(chat: ChatFormat, end_id: int):
    class Quoting(ToolEnv):
        async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
            if results:
                return EnvStep(observations=["half \ud83d pair"] * len(results))
            return EnvStep(done=True, reason="an\udc00swer")

    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [call_text(query="a"), ANSWER], server, make_env=Quoting) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert (trajectory.status, trajectory.reason) == (
        "COMPLETED",
        "an\N{REPLACEMENT CHARACTER}swer",
    )
    assert "half \N{REPLACEMENT CHARACTER} pair" in chat.decode(trajectory.token_ids.tolist())
