"""What a person changes on a run while it runs: tool instances and versions, servers, its end.

Reads and writes the registries in Redis; `agent-r1 tools`, `agent-r1 rollout` and the pages of the
console call the same functions.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
from pydantic import ValidationError

from agent_r1.config.sources import ConfigError
from agent_r1.runtime.files.run_folder import running_launcher
from agent_r1_proto.registry import Registry, RolloutServer, ToolRegistry
from agent_r1_proto.tool_pool import ToolInstance, ToolState, check_weights
from agent_r1_proto.tools import ToolHealth

LOOK_S = 0.2
UNDRAIN_TIMEOUT_S = 10.0
"""An instance that lives renews its announcement, and says that it takes calls, within this."""
HEALTH_TIMEOUT_S = 5.0


async def tool_state(registry: ToolRegistry, tool: str) -> ToolState:
    """Return the state of a tool.

    Raises:
        ConfigError: no instance of it is announced.
    """
    states = await registry.read()
    if tool not in states:
        raise ConfigError(
            f"no instance of a tool {tool!r} is announced in the pool {registry.pool!r}; there are "
            f"{', '.join(sorted(states)) or 'none'}"
        )
    return states[tool]


async def choose_instances(
    registry: ToolRegistry, tool: str, instance: str | None, version: str | None
) -> list[ToolInstance]:
    """Return the instances of a tool that a name or a version means.

    Raises:
        ConfigError: there is none, or neither was given and there are several.
    """
    state = await tool_state(registry, tool)
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


async def drain_tools(
    registry: ToolRegistry, tool: str, instance: str | None, version: str | None = None
) -> list[ToolInstance]:
    """Take an instance, or a version, out of service, and return what that is."""
    chosen = await choose_instances(registry, tool, instance, version)
    await registry.drain([one.instance for one in chosen])
    return chosen


async def undrain_tools(
    registry: ToolRegistry, tool: str, instance: str | None, version: str | None = None
) -> None:
    """Put drained instances back into service, and wait until they take calls."""
    chosen = await choose_instances(registry, tool, instance, version)
    await _put_back(registry, [one for one in chosen if one.draining])


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
        await asyncio.sleep(LOOK_S if names else 0)


async def is_needed(registry: ToolRegistry, one: ToolInstance) -> bool:
    """Return whether trajectories still use an instance that drains."""
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


async def set_weights(registry: ToolRegistry, tool: str, weights: Mapping[str, float]) -> ToolState:
    """Divide new trajectories among versions; without weights, the newest version gets all."""
    check_weights(weights)
    if not (await registry.read([tool]))[tool].versions:
        await tool_state(registry, tool)  # says that there is no such tool
    await registry.set_weights(tool, weights)
    return (await registry.read([tool]))[tool]


async def roll_back(
    registry: ToolRegistry, tool: str, version: str | None = None
) -> tuple[str, ToolState]:
    """Give all new trajectories to a version; None is the one before that which gets most now."""
    state = await tool_state(registry, tool)
    wanted = _version_before(state, tool, version)
    if wanted not in state.live_versions():
        await _put_back(registry, [one for one in state.instances if one.version == wanted])
    await registry.set_weights(tool, {wanted: 1.0})
    return wanted, await tool_state(registry, tool)


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


async def drain_server(registry: Registry, name: str, timeout_s: float) -> list[RolloutServer]:
    """Tell a rollout server to leave, and return the others.

    Raises:
        ConfigError: no server of this name is announced.
    """
    servers = await registry.rollout_servers()
    if name not in {one.server_id for one in servers}:
        there = ", ".join(one.server_id for one in servers) or "none"
        raise ConfigError(f"no rollout server {name!r} is announced; there are {there}")
    await registry.drain_rollout_server(name, timeout_s)
    return [one for one in servers if one.server_id != name]


def may_stop(folder: Path) -> bool:
    """Return whether a launcher of this machine runs a run, which `stop_run` asks."""
    return running_launcher(folder) is not None


def stop_run(folder: Path) -> None:
    """Ask the launcher of a run to stop it in order, as Ctrl-C in its terminal does.

    Raises:
        ConfigError: no launcher of this machine runs it.
    """
    launcher = running_launcher(folder)
    if launcher is None:
        raise ConfigError(
            f"no launcher on this machine runs {folder}; stop the run where it was started"
        )
    os.kill(int(launcher["pid"]), signal.SIGTERM)
