"""`agent-r1 tools list|drain|undrain|weight|rollback`: a pool's tool instances, and who gets calls.

Reads and writes the tool registry in Redis: of a run that is running (its folder), or of a pool
named by --redis and --pool. Rollout servers follow within a second.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import httpx
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from agent_r1.cli.live_run import ask, redis_and_name
from agent_r1.config.sources import ConfigError
from agent_r1_proto.registry import NOTICE_S, ToolRegistry
from agent_r1_proto.tool_pool import PinReport, ToolInstance, ToolState, check_weights
from agent_r1_proto.tools import ToolHealth

T = TypeVar("T")

DRAIN_LOOK_S = 0.2
UNDRAIN_TIMEOUT_S = 10.0
"""An instance that lives renews its announcement, and says that it takes calls, within this."""
HEALTH_TIMEOUT_S = 5.0
UNCUT_WIDTH = 400


def _ask(arguments: argparse.Namespace, question: Callable[[ToolRegistry], Awaitable[T]]) -> T:
    url, pool = redis_and_name(arguments, "pool", lambda run: run.tool_pool or run.id)
    return ask(url, "tools", lambda broker: question(ToolRegistry(broker, pool)))


async def _state(registry: ToolRegistry, tool: str) -> ToolState:
    states = await registry.read()
    if tool not in states:
        raise ConfigError(
            f"no instance of a tool {tool!r} is announced in the pool {registry.pool!r}; there are "
            f"{', '.join(sorted(states)) or 'none'}"
        )
    return states[tool]


def list_tools(arguments: argparse.Namespace) -> int:
    """Print every instance, the share its version is to get, and what rollout servers do."""

    async def look(registry: ToolRegistry) -> tuple[dict[str, ToolState], dict[str, PinReport]]:
        return await registry.read(), await registry.reports()

    states, reports = _ask(arguments, look)
    if not states:
        print("no tool instance is announced in this pool")
        return 0
    rows: list[tuple[str, ...]] = []
    for tool, state in sorted(states.items()):
        shares = state.shares()
        for one in state.instances:
            share, used = f"{shares.get(one.version, 0.0):.0%}", _used(tool, one.version, reports)
            state_now = "draining" if one.draining else "takes calls"
            up = f"{time.time() - one.started_at:.0f} s"
            rows.append((tool, one.version, share, used, one.instance, state_now, one.url, up))
    print_table(("tool", "version", "share", "used", "instance", "state", "url", "up"), rows)
    for line in (*_refusals(reports), *_waiting(states)):
        print(line)
    return 0


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; in a log or a pipe nothing is cut: names and addresses are to be copied."""
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else UNCUT_WIDTH).print(table)


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


def drain_tools(arguments: argparse.Namespace) -> int:
    """Take instances out: no new trajectories; wait until the running ones are done with them."""

    async def drain(registry: ToolRegistry) -> list[ToolInstance]:
        state = await _state(registry, arguments.tool)
        chosen = _chosen(state, arguments.tool, arguments.instance, arguments.version)
        await registry.drain([one.instance for one in chosen])
        print(f"draining {', '.join(one.instance for one in chosen)}")
        deadline = time.monotonic() + arguments.timeout_s
        await asyncio.sleep(min(NOTICE_S, arguments.timeout_s))
        busy = chosen
        while busy and time.monotonic() < deadline:
            busy = [one for one in busy if await _needed(registry, one)]
            await asyncio.sleep(DRAIN_LOOK_S if busy else 0)
        return busy

    busy = _ask(arguments, drain)
    if busy:
        print(
            f"still needed after {arguments.timeout_s:g} s: "
            f"{', '.join(one.instance for one in busy)}; if you stop it now, trajectories that "
            "use its version start again"
        )
        return 1
    print("drained; you can stop it now")
    return 0


def undrain_tools(arguments: argparse.Namespace) -> int:
    """Put drained instances back: they take new trajectories again."""

    async def undrain(registry: ToolRegistry) -> ToolState:
        state = await _state(registry, arguments.tool)
        chosen = [
            one
            for one in _chosen(state, arguments.tool, arguments.instance, arguments.version)
            if one.draining
        ]
        await _put_back(registry, chosen)
        return await _state(registry, arguments.tool)

    _print_shares(arguments.tool, _ask(arguments, undrain))
    return 0


async def _put_back(registry: ToolRegistry, drained: Sequence[ToolInstance]) -> None:
    """Undrain instances and wait until they have announced it.

    Raises:
        ConfigError: one of them is shutting down.
    """
    names = {one.instance for one in drained}
    await registry.undrain(sorted(names))
    deadline = time.monotonic() + UNDRAIN_TIMEOUT_S
    while names:
        states = await registry.read(sorted({one.tool for one in drained}))
        names &= {one.instance for s in states.values() for one in s.instances if one.draining}
        if names and time.monotonic() > deadline:
            raise ConfigError(
                f"{', '.join(sorted(names))} did not take calls again within "
                f"{UNDRAIN_TIMEOUT_S:g} s: it is shutting down, or does not answer; start another "
                "instance of its version"
            )
        await asyncio.sleep(DRAIN_LOOK_S if names else 0)


def _chosen(
    state: ToolState, tool: str, instance: str | None, version: str | None
) -> list[ToolInstance]:
    chosen = [
        one
        for one in state.instances
        if instance in (None, one.instance) and version in (None, one.version)
    ]
    if not chosen:
        raise ConfigError(
            f"no instance of {tool!r} matches; the instances are "
            f"{', '.join(f'{one.instance} ({one.version})' for one in state.instances)}"
        )
    if len(chosen) == len(state.instances) and instance is None and version is None:
        raise ConfigError(f"choose the instances of {tool!r} with --instance or --version")
    return chosen


async def _needed(registry: ToolRegistry, one: ToolInstance) -> bool:
    state = (await registry.read([one.tool]))[one.tool]
    if one.instance not in {other.instance for other in state.instances}:
        return False
    if one.spec.sessions and await _open_sessions(one) > 0:
        return True
    if any(other.version == one.version and not other.draining for other in state.instances):
        return False
    return await registry.pinned(one.tool, one.version) > 0


async def _open_sessions(one: ToolInstance) -> int:
    """Return how many sessions an instance holds; 0 for one that does not answer any more."""
    try:
        async with httpx.AsyncClient(timeout=HEALTH_TIMEOUT_S, trust_env=False) as client:
            answer = await client.get(f"{one.url}/healthz")
        return ToolHealth.model_validate_json(answer.content).sessions
    except (httpx.HTTPError, ValidationError):
        return 0


def weight_tools(arguments: argparse.Namespace) -> int:
    """Set the shares of new trajectories, or give everything to the newest version."""
    weights = {} if arguments.newest else _parse_weights(arguments.weights)
    if not weights and not arguments.newest:
        raise ConfigError("give VERSION=WEIGHT, once or more, or --newest")

    async def write(registry: ToolRegistry) -> ToolState:
        if not (await registry.read([arguments.tool]))[arguments.tool].versions:
            await _state(registry, arguments.tool)  # says that there is no such tool
        await registry.set_weights(arguments.tool, weights)
        return (await registry.read([arguments.tool]))[arguments.tool]

    state = _ask(arguments, write)
    _print_shares(arguments.tool, state)
    for version in sorted(set(weights) - set(state.versions)):
        print(
            f"no instance of version {version} has ever been announced; it gets its share when "
            "one is"
        )
    return 0


def _parse_weights(texts: Sequence[str]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for text in texts:
        version, equals, number = text.rpartition("=")
        if not equals:
            raise ConfigError(f"{text!r} is not VERSION=WEIGHT, such as 1.2=0.1")
        if version in weights:
            raise ConfigError(f"version {version!r} is given twice; give it one weight")
        try:
            weights[version] = float(number)
        except ValueError as exc:
            raise ConfigError(f"{text!r} is not VERSION=WEIGHT, such as 1.2=0.1") from exc
    try:
        check_weights(weights)
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc
    return weights


def rollback_tool(arguments: argparse.Namespace) -> int:
    """Give all new trajectories to the version before the one that gets most now."""

    async def write(registry: ToolRegistry) -> tuple[str, ToolState]:
        state = await _state(registry, arguments.tool)
        wanted = _version_before(state, arguments.tool, arguments.version)
        if wanted not in state.live_versions():
            await _put_back(registry, [one for one in state.instances if one.version == wanted])
        await registry.set_weights(arguments.tool, {wanted: 1.0})
        return wanted, await _state(registry, arguments.tool)

    wanted, state = _ask(arguments, write)
    print(f"{arguments.tool} is back at version {wanted}; `weight --newest` undoes it")
    _print_shares(arguments.tool, state)
    return 0


def _version_before(state: ToolState, tool: str, wanted: str | None) -> str:
    """Return the version to go back to: the one that is asked for, or the one before.

    A drained version is still there; without a name it is taken where no other takes calls.
    """
    there = [v for v in state.versions if v in {one.version for one in state.instances}]
    if wanted is not None:
        if wanted not in there:
            raise ConfigError(
                f"version {wanted!r} of {tool!r} has no instance; there are "
                f"{', '.join(there) or 'none'}; start it again first"
            )
        return wanted
    shares = state.shares()
    current = max(shares, key=lambda version: shares[version], default=None)
    before = there[: there.index(current)] if current in there else []
    if not before:
        raise ConfigError(
            f"{tool!r} has no instance of a version before {current} (there are "
            f"{', '.join(there) or 'none'}); start the old one again first"
        )
    live = [version for version in before if version in state.live_versions()]
    return (live or before)[-1]


def _print_shares(tool: str, state: ToolState) -> None:
    shares = ", ".join(f"{version} {share:.0%}" for version, share in state.shares().items())
    print(f"new trajectories of {tool}: {shares or 'no version takes calls'}")
