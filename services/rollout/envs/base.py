"""ToolEnv: state transition, stop and process reward of an interaction with tools.

agent_loop.py makes one instance per trajectory; turns.py calls `step` after each turn of the model.
A `Tool` says what happened (one call, its raw result); a `ToolEnv` says what that means: what the
model sees next, what a call was worth, and whether the interaction is over. A class of your own is
named `env.type = "module:Name"` and found through `run.plugins`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from pydantic import JsonValue

from agent_r1_proto.parts import Part, text_of
from agent_r1_proto.tasks import Task

Observation = str | Sequence[Part]
"""Observation of the model: text, or parts (`agent_r1.TextPart`, images)."""
CallStatus = Literal["ok", "error", "malformed", "unknown_tool", "over_limit"]


@dataclass(frozen=True)
class CallResult:
    """One tool call of a turn and what came of it."""

    name: str
    """Tool the model named; "" when the call could not be read."""
    arguments: dict[str, JsonValue]
    """Arguments, as the model wrote them."""
    status: CallStatus
    """ok and error come from the tool; the others say why it was not run."""
    text: str
    """Text of the result, already cut to the limits of `[env]`. Of a result with an image there is
    none: whoever asks for it ends the attempt as FAILED (`image_refused`), and may read `parts`."""
    data: JsonValue = None
    """Data that the tool sent beside its text, for the environment only."""
    parts: Sequence[Part] = ()
    """The result in parts, where it is more than text."""

    @property
    def observation(self) -> Observation:
        """Text that the model sees of it, unless the environment says otherwise."""
        return self.parts or self.text


class _TextAlone:
    """Keeps the text of a result, and refuses it where that would leave an image out."""

    def __get__(self, result: CallResult, _: type[CallResult]) -> str:
        text_of(result.parts)
        return vars(result)["text"]

    def __set__(self, result: CallResult, text: str) -> None:
        vars(result)["text"] = text


setattr(CallResult, "text", _TextAlone())  # noqa: B010  # behind the class: no default of a field


@dataclass(frozen=True)
class ModelTurn:
    """One turn of the model, read."""

    number: int
    """0 for the first turn."""
    text: str
    """The whole turn, decoded."""
    thought: str | None
    """Inside the `<think>` block with which it begins; None without one."""
    answer: str | None
    """Inside its last `<answer>` block, or what `env.answer_pattern` finds; None without one."""
    said: str | None = None
    """The turn without its thoughts; None where that is all of it."""


@dataclass(frozen=True)
class EnvStep:
    """The environment's reaction to one turn."""

    observations: Sequence[Observation] = ()
    """Observation of each call: one per call, in call order, or none where `message` shows the
    results. Cut to the limits."""
    process_rewards: Sequence[float | None] = ()
    """Reward of each call, placed on the token that closes it; empty: none."""
    turn_reward: float | None = None
    """Reward of the turn beside those of its calls, placed on its last token."""
    state_key: str = ""
    """Names the state that the turn led to, for estimators that compare turns taken in the same
    state (advantage "gigpo"): trajectories of a group with equal keys are in the same state. "" is
    a state like no other."""
    message: Observation | None = None
    """Shown as a message of role user after the observations; see `ToolEnv.sends_messages`."""
    done: bool = False
    """True ends the trajectory as COMPLETED; the observations are then shown to rewards alone."""
    reason: str = ""
    """Why it is done, in a word or two: "answer", "solved"."""
    data: JsonValue = None
    """Anything for reward components (`ScoreTurn.data`) and logs, never shown to the model; not
    recorded where it is over 16 KiB as JSON. At most 100 lists and dicts within one another."""


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
