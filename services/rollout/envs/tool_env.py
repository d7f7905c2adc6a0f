"""ToolEnv: state transition, stop and process reward of an interaction with tools.

agent_loop.py makes one instance per trajectory; turns.py calls `step` after each turn of the model.
A class of your own is named `env.type = "module:Name"` and found through `run.plugins`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar, Self

from agent_r1.rollout.envs.base import CallResult, EnvStep, ModelTurn
from agent_r1_proto.tasks import Task


class ToolEnv:
    """The default environment: results are shown as they are, a turn without a call is the answer.

    Subclass it to decide otherwise. `self.task.payload` holds what the model must not see (goals,
    tests); state between turns lives in attributes. Example, a process reward for calls that found
    something, and an end after the tool `submit`:

        class Submit(ToolEnv):
            async def step(self, turn, results):
                step = await super().step(turn, results)
                found = [0.1 if result.status == "ok" else -0.1 for result in results]
                step = replace(step, process_rewards=found)
                if any(result.name == "submit" for result in results):
                    return replace(step, done=True, reason="submitted")
                return step

    Args:
        task: what the agent was asked; keyword arguments of a subclass come from `env.options`.
    """

    sends_messages: ClassVar[bool] = False
    """True where `EnvStep.message` is used, so that the chat template is checked for it at start
    (templates that drop earlier thinking do so at every user message)."""

    def __init__(self, task: Task) -> None:
        self.task = task

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        """React to one turn.

        Args:
            turn: what the model wrote.
            results: one per tool call of the turn, in call order; [] when it made none.

        Returns:
            What the model sees, what the calls were worth, and whether this is the end.
        """
        if not results:
            return EnvStep(done=True, reason="answer")
        return EnvStep(observations=[result.observation for result in results])

    def fork(self) -> Self:
        """Return a copy that goes on by itself, for another branch of the interaction.

        Decoding asks for it between two steps. Attributes are copied deeply, the task is shared;
        write it where an attribute cannot be copied. `close` is called for copies too.
        """
        return copy.deepcopy(self, {id(self.task): self.task})

    async def close(self) -> None:
        """Release what the environment holds; called however the trajectory ended."""
