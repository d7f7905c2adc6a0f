"""Types between turns.py and a ToolEnv: what a turn led to, as the environment says it.

A `Tool` says what happened (one call, its raw result); a `ToolEnv` says what that means: what the
model sees next, what a call was worth, and whether the interaction is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

from agent_r1_proto.parts import StoredImage, TextPart, text_of

Part = TextPart | StoredImage

Observation = str | Sequence[Part]
"""What the model is shown: text, or parts (`agent_r1.TextPart`, images)."""
CallStatus = Literal["ok", "error", "malformed", "unknown_tool", "over_limit"]


@dataclass(frozen=True)
class CallResult:
    """One tool call of a turn and what came of it."""

    name: str
    """Tool the model named; "" when the call could not be read."""
    arguments: dict[str, JsonValue]
    """As the model wrote them."""
    status: CallStatus
    """ok and error come from the tool; the others say why it was not run."""
    text: str
    """Text of the result, already cut to the limits of `[env]`. Of a result with an image there is
    none: whoever asks for it ends the attempt as FAILED (`image_refused`), and may read `parts`."""
    data: JsonValue = None
    """What the tool sent beside its text, for the environment only."""
    parts: Sequence[Part] = ()
    """The result in parts, where it is more than text."""

    @property
    def observation(self) -> Observation:
        """What the model sees of it, unless the environment says otherwise."""
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
    """What the model sees of each call: one per call, in call order, or none where `message` shows
    the results. Cut to the limits."""
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
    reason: str = field(default="")
    """Why it is done, in a word or two: "answer", "solved"."""
    data: JsonValue = None
    """Anything for reward components (`ScoreTurn.data`) and logs, never shown to the model; not
    recorded where it is over 16 KiB as JSON. At most 100 lists and dicts within one another."""
