"""Changes of a running run that the console offers, each confirmed on a page of its own.

services.html links to them with their fields; operations.py carries them out, as for the commands.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from agent_r1.console.control import operations
from agent_r1_proto.registry import Registry, ToolRegistry
from agent_r1_proto.streams import Broker
from agent_r1_proto.tool_pool import ToolState

SERVER_TIMEOUT_S = 120.0
"""Time that a rollout server has to finish its samples, as `agent-r1 rollout drain` gives it."""
WEIGHT_PREFIX = "weight:"
Fields: TypeAlias = Mapping[str, str]
Change: TypeAlias = Callable[[Broker, ToolRegistry, Fields], Awaitable[object]]


@dataclass(frozen=True)
class Action:
    """One change."""

    button: str
    question: str
    """Question on its page; what the fields name stands below."""
    done: str
    """Sentence on the page of the services when it is done."""
    fields: tuple[str, ...]
    """Names of the fields that say what is changed."""
    change: Change


async def _drain(_: Broker, tools: ToolRegistry, fields: Fields) -> None:
    await operations.drain_tools(tools, fields["tool"], fields["instance"])


async def _undrain(_: Broker, tools: ToolRegistry, fields: Fields) -> None:
    await operations.undrain_tools(tools, fields["tool"], fields["instance"])


async def _weight(_: Broker, tools: ToolRegistry, fields: Fields) -> ToolState:
    return await operations.set_weights(tools, fields["tool"], read_weights(fields))


async def _roll_back(_: Broker, tools: ToolRegistry, fields: Fields) -> None:
    await operations.roll_back(tools, fields["tool"])


async def _drain_server(broker: Broker, _: ToolRegistry, fields: Fields) -> None:
    await operations.drain_server(Registry(broker), fields["server"], SERVER_TIMEOUT_S)


def read_weights(fields: Fields) -> dict[str, float]:
    """Return the weights in a form, by version; an empty field sets none.

    Raises:
        ValueError: one is no number.
    """
    weights: dict[str, float] = {}
    for name, text in fields.items():
        if name.startswith(WEIGHT_PREFIX) and text.strip():
            version = name.removeprefix(WEIGHT_PREFIX)
            try:
                weights[version] = float(text)
            except ValueError as exc:
                raise ValueError(
                    f"weight of version {version} ({text!r}) must be a number >= 0, such as 0.1"
                ) from exc
    return weights


ACTIONS = {
    "drain": Action(
        button="Drain",
        question="Drain this instance? It gets no new trajectories and finishes those it has.",
        done="The instance drains. Stop it when no trajectory keeps its version.",
        fields=("tool", "instance"),
        change=_drain,
    ),
    "undrain": Action(
        button="Undrain",
        question="Put this instance back into service?",
        done="The instance takes calls again.",
        fields=("tool", "instance"),
        change=_undrain,
    ),
    "weight": Action(
        button="Set weights",
        question="How are new trajectories divided among the versions? Without any weight, the "
        "newest version gets all.",
        done="The weights are set. Rollout servers follow within a second.",
        fields=("tool",),
        change=_weight,
    ),
    "rollback": Action(
        button="Roll back",
        question="Give all new trajectories to the version before the one that gets most now?",
        done="The version before has all new trajectories. Setting no weight undoes it.",
        fields=("tool",),
        change=_roll_back,
    ),
    "drain-server": Action(
        button="Drain",
        question="Take this rollout server out of service? It takes no more samples, finishes "
        f"those it has within {SERVER_TIMEOUT_S:g} s, gives back the rest and ends.",
        done="The server takes no more samples, and ends by itself.",
        fields=("server",),
        change=_drain_server,
    ),
}
STOP = "stop"
STOP_QUESTION = (
    "Stop this run? Its launcher stops every service in order and keeps a checkpoint; "
    "`agent-r1 train --resume` continues the run."
)
STOP_DONE = "The launcher has been asked to stop the run."
