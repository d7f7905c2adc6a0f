"""The services of a run now: streams, rollout servers, tools, models of reward components.

Reads what they announce in Redis; `agent-r1 status` prints it, and the page of the services shows
it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agent_r1.reward.components import ASKING
from agent_r1.runtime.durations import format_duration
from agent_r1_proto.registry import Registry, RolloutServer, ToolRegistry
from agent_r1_proto.scoring_models import ScoringModels
from agent_r1_proto.streams import Broker
from agent_r1_proto.tool_pool import PinReport, ToolInstance, ToolState


@dataclass(frozen=True)
class StreamDepth:
    """Samples between two services."""

    name: str
    waiting: int
    taken: int
    """Those that a service works on."""


@dataclass(frozen=True)
class ToolRow:
    """One instance, with the share of new trajectories that its version is to get, and gets."""

    tool: str
    version: str
    share: str
    used: str
    instance: ToolInstance
    pinned: int
    """Trajectories that keep the version."""


@dataclass(frozen=True)
class ModelRow:
    """One version of a model that a reward component asks."""

    component: str
    version: str
    scores: str
    used: str
    url: str


@dataclass(frozen=True)
class ToolsView:
    """The tools of a pool."""

    states: Mapping[str, ToolState]
    rows: list[ToolRow]
    notes: list[str]
    """Versions that servers refuse, and those with a weight whose instances are away."""


async def read_streams(broker: Broker) -> list[StreamDepth]:
    """Read what waits between the services."""
    found: list[StreamDepth] = []
    for name, (stream, group) in broker.keys.stages().items():
        taken = await broker.pending(stream, group)
        found.append(StreamDepth(name, max(0, await broker.depth(stream) - taken), taken))
    return found


async def read_servers(broker: Broker) -> list[RolloutServer]:
    """Read the rollout servers that are announced."""
    return await Registry(broker).rollout_servers()


async def read_tools(registry: ToolRegistry) -> ToolsView:
    """Read every instance of a pool."""
    states, reports = await registry.read(), await registry.reports()
    rows: list[ToolRow] = []
    for tool, state in sorted(states.items()):
        shares = state.shares()
        pinned = {v: _pinned(tool, v, reports) for v in {i.version for i in state.instances}}
        for one in state.instances:
            share = f"{shares.get(one.version, 0.0):.0%}"
            used = _used(tool, one.version, reports)
            rows.append(ToolRow(tool, one.version, share, used, one, pinned[one.version]))
    return ToolsView(states, rows, [*_refusals(reports), *_waiting(states)])


async def read_models(broker: Broker) -> list[ModelRow]:
    """Read every version of the models that reward components ask."""
    models = ScoringModels(broker)
    rows: list[ModelRow] = []
    for component in ASKING:
        used = await models.last_used(component)
        for place, one in enumerate(found := await models.read(component), 1):
            scores = "what comes" if place == len(found) else "groups it has begun"
            at = used.get(one.version)
            ago = "never" if at is None else f"{since(at)} ago"
            rows.append(ModelRow(component, one.version, scores, ago, one.url))
    return rows


def since(at: float) -> str:
    """Return the time since a Unix time."""
    return format_duration(time.time() - at)


def _pinned(tool: str, version: str, reports: Mapping[str, PinReport]) -> int:
    pins = [pin for report in reports.values() for pin in report.pins]
    return sum(pin.count for pin in pins if (pin.tool, pin.version) == (tool, version))


def _used(tool: str, version: str, reports: Mapping[str, PinReport]) -> str:
    """Return the share that rollout servers really give to a version."""
    uses = [use for report in reports.values() for use in report.tools if use.tool == tool]
    found = sorted({f"{use.shares.get(version, 0.0):.0%}" for use in uses})
    if any(version in use.refused for use in uses):
        return "refused" if found == ["0%"] else f"refused, {', '.join(found)}"
    return ", ".join(found) or "-"


def _refusals(reports: Mapping[str, PinReport]) -> Iterator[str]:
    servers: dict[tuple[str, str, str], list[str]] = {}
    for server, report in sorted(reports.items()):
        for use in report.tools:
            for version, reason in sorted(use.refused.items()):
                servers.setdefault((use.tool, version, reason), []).append(server)
    for (tool, version, reason), names in servers.items():
        yield f"{tool} {version} is refused by {', '.join(names)}: {reason}"


def _waiting(states: Mapping[str, ToolState]) -> Iterator[str]:
    for tool, state in sorted(states.items()):
        live = state.live_versions()
        for version in sorted(set(state.weights) - set(live)):
            if state.weights[version] > 0:
                yield (
                    f"{tool} {version} has the weight {state.weights[version]:g}, but no instance "
                    "of it takes calls"
                )
