"""Scripted policies: agents without a model, played against a configuration's tools and rewards.

`agent-r1 diagnose` reads them from `[diagnose]` and gets the outcome reward of every task. Tools,
ToolEnv and reward components are the run's own classes, called in this process: what an agent
without any ability can reach, and whether one that makes no mistake is always right, is a property
of the task and needs no service.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from agent_r1.config.run import Config
from agent_r1.evaluation.config import ScriptedPolicyConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.rollout.envs import CallResult, ModelTurn, ToolEnv, load_env_class
from agent_r1.runtime.user_code import import_named
from agent_r1.text.reading import ParsedCall
from agent_r1.tools.base import CallContext, Tool
from agent_r1.tools.loading import load_tool
from agent_r1_proto.parts import shown_text
from agent_r1_proto.rewards import ScoreCall, ScoreRequest, ScoreTurn
from agent_r1_proto.tasks import Task
from agent_r1_proto.tools import ToolResult


class ScriptedPolicy(Protocol):
    """Class that `[diagnose]` names: each instance takes the turns of one interaction."""

    def turn(self, observations: Sequence[str], /) -> str:
        """Return the text of the next turn.

        Args:
            observations: what the environment showed of the last turn's calls; [] at first.
        """
        ...


class Stage:
    """The tools, environment and rewards of a configuration, in this process."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._env_class = load_env_class(config.env.type, set(config.env.options))
        self._reader = config.turn_reader()
        self._scorer = Scorer(config.reward, self._reader)
        self.tools: dict[str, Tool] = {
            name: load_tool(name, tool) for name, tool in config.tools.items()
        }

    async def rewards(self, policy: ScriptedPolicyConfig, tasks: Sequence[Task]) -> list[float]:
        """Play a policy through every task, and return the outcome rewards."""
        make = load_policy(policy)
        return [
            await self._play(make(task, **policy.options), task, f"scripted/0/{i}/0/0")
            for i, task in enumerate(tasks)
        ]

    async def _play(self, policy: ScriptedPolicy, task: Task, rollout_id: str) -> float:
        env = self._env_class(task, **self._config.env.options)
        try:
            turns = await self._interact(policy, env, task, rollout_id)
        finally:
            await env.close()
        request = ScoreRequest(payload=task.payload, turns=turns)
        return (await self._scorer.score(request)).total

    async def _interact(
        self, policy: ScriptedPolicy, env: ToolEnv, task: Task, rollout_id: str
    ) -> list[ScoreTurn]:
        turns: list[ScoreTurn] = []
        observations: Sequence[str] = ()
        for number in range(self._config.env.max_turns):
            text = policy.turn(observations)
            read = self._reader.read(text)
            context = CallContext(rollout_id, number, task.tool_context, timeout_s=60.0)
            results = [await self._call(call, context) for call in read.calls]
            calls = [
                ScoreCall(tool=r.name, arguments=r.arguments, status=r.status, data=r.data)
                for r in results
            ]
            turns.append(ScoreTurn(text=text, num_calls=len(calls), calls=calls))
            turn = ModelTurn(number, text, read.thought, read.answer, read.said)
            step = await env.step(turn, results)
            if step.done:
                break
            observations = list(map(shown_text, step.observations))
        return turns

    async def _call(self, call: ParsedCall, context: CallContext) -> CallResult:
        tool = self.tools.get(call.name)
        if call.error or tool is None:
            error = call.error or f"there is no tool {call.name!r}"
            status = "malformed" if call.error else "unknown_tool"
            return CallResult(call.name, call.arguments, status, f"Error: {error}")
        result = await tool.call(call.arguments, context)
        if not isinstance(result, ToolResult):
            return CallResult(call.name, call.arguments, "ok", result)
        return CallResult(call.name, call.arguments, result.status, result.text(), result.data)


def load_policy(policy: ScriptedPolicyConfig) -> type:
    """Return the class of a scripted policy.

    Raises:
        ValueError: it cannot be imported, is no such class, or does not take the options.
    """
    label = f"diagnose: {policy.type}"
    found = import_named(policy.type, label)
    if not (isinstance(found, type) and callable(getattr(found, "turn", None))):
        raise ValueError(f"{label} must be a class with a method turn(observations)")
    try:
        inspect.signature(found).bind(None, **policy.options)
    except TypeError as exc:
        raise ValueError(
            f"{label} is made as {found.__name__}(task, **options) with the options "
            f"{sorted(policy.options)}: {exc}; correct its options"
        ) from exc
    return found


def play_all(
    config: Config,
    policies: Mapping[str, ScriptedPolicyConfig],
    sets: Mapping[str, Sequence[Task]],
) -> dict[str, dict[str, list[float]]]:
    """Return the outcome rewards by policy and set.

    Raises:
        ValueError: a class cannot be loaded; the text says which and why.
    """
    stage = Stage(config)

    async def play() -> dict[str, dict[str, list[float]]]:
        async with AsyncExitStack() as started:
            # Once for all policies, since some tools take no second start.
            for tool in stage.tools.values():
                await tool.start()
                started.push_async_callback(tool.stop)
            return {
                name: {of: await stage.rewards(policy, tasks) for of, tasks in sets.items()}
                for name, policy in policies.items()
            }

    return asyncio.run(play())
