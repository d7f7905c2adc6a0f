"""`agent-r1 rollout drain`: takes a rollout server of a run out of service.

Reads and writes the run's registry in Redis: of a run that is running (its folder), or named by
--redis and --id.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from agent_r1.cli.declare import number
from agent_r1.cli.live_run import add_run, ask_run
from agent_r1.config.sources import ConfigError
from agent_r1.console.control.operations import LOOK_S, drain_server
from agent_r1_proto.registry import DRAIN_EXPIRY_S, Registry, RolloutServer


def drain_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rollout drain`."""
    add_run(parser)
    parser.add_argument("server", metavar="NAME", help="the server, as `agent-r1 status` names it")
    parser.add_argument(
        "--timeout-s",
        type=number(0),
        default=120.0,
        metavar="S",
        help="time to finish the samples in flight, in seconds (default: 120)",
    )


def drain(arguments: argparse.Namespace) -> int:
    """Take a rollout server out of service.

    It takes no more samples, finishes those it has, gives back to the other servers what takes
    longer than --timeout-s, and ends. Nothing is lost. To add one, start `agent-r1 serve rollout`.
    """
    name, timeout_s = arguments.server, arguments.timeout_s

    async def leave(registry: Registry) -> list[RolloutServer]:
        await drain_server(registry, name, timeout_s)
        deadline = time.monotonic() + DRAIN_EXPIRY_S
        servers = await registry.rollout_servers()
        while name in {one.server_id for one in servers}:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{name} did not answer within {DRAIN_EXPIRY_S} s; stop its process with "
                    "SIGTERM, which gives its samples back"
                )
            await asyncio.sleep(LOOK_S)
            servers = await registry.rollout_servers()
        return servers

    others = ask_run(arguments, lambda broker: leave(Registry(broker)))
    print(
        f"{name} takes no more samples; it finishes those it has within {timeout_s:g} s, gives "
        "back the rest and ends by itself"
    )
    if not others:
        print("it was the only rollout server: the run waits until another one joins")
    return 0
