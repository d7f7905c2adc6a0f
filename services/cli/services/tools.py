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

from agent_r1.cli.declare import add_config, number
from agent_r1.cli.live_run import ask, redis_and_name
from agent_r1.cli.services.serve import configure_logging
from agent_r1.config import checks as config_checks
from agent_r1.config.run import ConfigError, load_config
from agent_r1.console.control.operations import (
    LOOK_S,
    drain_tools,
    is_needed,
    roll_back,
    set_weights,
    tool_state,
    undrain_tools,
)
from agent_r1_proto.registry import NOTICE_S, ToolRegistry
from agent_r1_proto.tool_pool import ToolInstance, ToolState, check_weights

T = TypeVar("T")


def _ask(arguments: argparse.Namespace, question: Callable[[ToolRegistry], Awaitable[T]]) -> T:
    url, pool = redis_and_name(arguments, "pool", lambda run: run.tool_pool or run.id)
    return ask(url, "tools", lambda broker: question(ToolRegistry(broker, pool)))


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
        chosen = await drain_tools(registry, arguments.tool, arguments.instance, arguments.version)
        print(f"draining {', '.join(one.instance for one in chosen)}")
        deadline = time.monotonic() + arguments.timeout_s
        await asyncio.sleep(min(NOTICE_S, arguments.timeout_s))
        busy = chosen
        while busy and time.monotonic() < deadline:
            busy = [one for one in busy if await is_needed(registry, one)]
            await asyncio.sleep(LOOK_S if busy else 0)
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
        await undrain_tools(registry, arguments.tool, arguments.instance, arguments.version)
        return await tool_state(registry, arguments.tool)

    _print_shares(arguments.tool, _ask(arguments, put_back))
    return 0


def weight(arguments: argparse.Namespace) -> int:
    """Divide new trajectories among versions, or give all of them to the newest one."""
    weights = {} if arguments.newest else _parse_weights(arguments.weights)
    if not weights and not arguments.newest:
        raise ConfigError("give VERSION=WEIGHT, once or more, or --newest")

    state = _ask(arguments, lambda registry: set_weights(registry, arguments.tool, weights))
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

    wanted, state = _ask(
        arguments, lambda registry: roll_back(registry, arguments.tool, arguments.version)
    )
    print(f"{arguments.tool} is back at version {wanted}; `weight --newest` undoes it")
    _print_shares(arguments.tool, state)
    return 0


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
