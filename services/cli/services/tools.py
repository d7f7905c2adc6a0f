"""`agent-r1 tools`: who of a pool's tool instances gets calls, and one tool for an MCP agent.

Reads and writes the tool registry in Redis: of a run that is running (its folder), or of a pool
named by --redis and --pool. Rollout servers follow within a second.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import httpx
from pydantic import ValidationError

from agent_r1.cli.declare import add_config, number
from agent_r1.cli.live_run import ask, redis_and_name
from agent_r1.cli.services.serve import configure_logging
from agent_r1.config import checks as config_checks
from agent_r1.config.run import ConfigError, load_config
from agent_r1_proto.registry import NOTICE_S, ToolRegistry
from agent_r1_proto.tool_pool import ToolInstance, ToolState, check_weights
from agent_r1_proto.tools import ToolHealth

T = TypeVar("T")

DRAIN_LOOK_S = 0.2
UNDRAIN_TIMEOUT_S = 10.0
"""An instance that lives renews its announcement, and says that it takes calls, within this."""
HEALTH_TIMEOUT_S = 5.0


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


def drain_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tools drain`."""
    undrain_arguments(parser)
    parser.add_argument(
        "--timeout-s",
        type=number(0),
        default=120.0,
        metavar="S",
        help="longest wait for trajectories that still need it, in seconds (default: 120)",
    )


def undrain_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tools undrain`."""
    _add_tool(parser)
    instance_help = "this instance, as `agent-r1 status` names it"
    parser.add_argument("--instance", metavar="NAME", help=instance_help)
    parser.add_argument("--version", metavar="VERSION", help="every instance of this version")


def weight_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tools weight`."""
    _add_tool(parser)
    parser.add_argument(
        "weights",
        nargs="*",
        metavar="VERSION=WEIGHT",
        help="such as 1.0=9 2.0=1; a version without an instance gets its share once it has one",
    )
    newest_help = "give everything to the newest version again"
    parser.add_argument("--newest", action="store_true", help=newest_help)


def rollback_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tools rollback`."""
    _add_tool(parser)
    parser.add_argument("--version", metavar="VERSION", help="give it to this version instead")


def _add_tool(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", dest="run_folder", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--redis", metavar="URL", help="Redis of the pool, without --run")
    parser.add_argument("--pool", metavar="NAME", help="tool pool (run.tool_pool)")
    parser.add_argument("tool", metavar="TOOL", help="name of the tool")


def drain(arguments: argparse.Namespace) -> int:
    """Take an instance, or a version, out of service.

    It gets no new trajectories, as rollout servers learn within a second; the command waits until
    the running ones are done with it.
    """

    async def wait(registry: ToolRegistry) -> list[ToolInstance]:
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

    busy = _ask(arguments, wait)
    if busy:
        print(
            f"still needed after {arguments.timeout_s:g} s: "
            f"{', '.join(one.instance for one in busy)}; if you stop it now, trajectories that "
            "use its version start again"
        )
        return 1
    print("drained; you can stop it now")
    return 0


def undrain(arguments: argparse.Namespace) -> int:
    """Put drained instances back into service."""

    async def put_back(registry: ToolRegistry) -> ToolState:
        state = await _state(registry, arguments.tool)
        chosen = [
            one
            for one in _chosen(state, arguments.tool, arguments.instance, arguments.version)
            if one.draining
        ]
        await _put_back(registry, chosen)
        return await _state(registry, arguments.tool)

    _print_shares(arguments.tool, _ask(arguments, put_back))
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


def weight(arguments: argparse.Namespace) -> int:
    """Divide new trajectories among versions, or give all of them to the newest one."""
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
    """Return the weight of each version.

    Raises:
        ValueError: a text is no VERSION=WEIGHT, or the weights mean nothing together.
    """
    weights: dict[str, float] = {}
    for text in texts:
        try:
            version, number = text.rsplit("=", 1)
            weight = float(number)
        except ValueError as exc:
            raise ConfigError(f"{text!r} is not VERSION=WEIGHT, such as 1.2=0.1") from exc
        if version in weights:
            raise ConfigError(f"version {version!r} is given twice; give it one weight")
        weights[version] = weight
    check_weights(weights)
    return weights


def rollback(arguments: argparse.Namespace) -> int:
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


def mcp_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tools mcp`."""
    add_config(parser)
    parser.add_argument("tool", metavar="TOOL", help="name of its table, [tools.TOOL]")


def mcp(arguments: argparse.Namespace) -> int:
    """Serve one tool of a configuration to an MCP agent over standard input and output.

    The agent starts this command itself; logs go to standard error. A tool service that already
    runs offers the same at its URL + /mcp.
    """
    config = load_config(arguments.config, arguments.options).config
    name: str = arguments.tool
    if name not in config.tools:
        raise ConfigError(f"there is no [tools.{name}]; the tools are {sorted(config.tools)}")
    table = config.tools[name]
    if table.url is not None:
        raise ConfigError(
            f"tools.{name}.url ({table.url}) names a service that already runs; give the agent "
            f"{table.url.rstrip('/')}/mcp (streamable HTTP), or remove url to serve it here"
        )
    configure_logging(config.run, arguments.tool)
    config_checks.use_plugins(config)
    from agent_r1.tools.app import ToolService
    from agent_r1.tools.loading import load_tool
    from agent_r1.tools.mcp.server import serve_stdio

    async def serve() -> None:
        await serve_stdio(ToolService(load_tool(name, table), f"{name}-stdio", table))

    asyncio.run(serve())
    return 0
