"""`agent-r1 rollout list|drain`: the rollout servers of a run, and taking one out of service.

Reads and writes the run's registry in Redis: of a run that is running (its folder), or named by
--redis and --id.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from agent_r1.cli.live_run import ask_run
from agent_r1.cli.services.tools import print_table
from agent_r1.config.sources import ConfigError
from agent_r1_proto.registry import DRAIN_EXPIRY_S, Registry, RolloutServer

LOOK_S = 0.2


def list_servers(arguments: argparse.Namespace) -> int:
    """Print every rollout server that takes samples."""
    servers = ask_run(arguments, lambda broker: Registry(broker).rollout_servers())
    if not servers:
        print("no rollout server is announced in this run")
        return 0
    rows: list[tuple[str, ...]] = []
    for one in servers:
        up = f"{time.time() - one.started_at:.0f} s"
        rows.append((one.server_id, str(one.policy_version), one.host, one.url, up))
    print_table(("server", "policy version", "host", "url", "up"), rows)
    return 0


def drain_server(arguments: argparse.Namespace) -> int:
    """Tell a server to leave, and wait until it takes no more samples."""
    name, timeout_s = arguments.server, arguments.timeout_s

    async def drain(registry: Registry) -> list[RolloutServer]:
        servers = await registry.rollout_servers()
        if name not in {one.server_id for one in servers}:
            there = ", ".join(one.server_id for one in servers) or "none"
            raise ConfigError(f"no rollout server {name!r} is announced; there are {there}")
        await registry.drain_rollout_server(name, timeout_s)
        deadline = time.monotonic() + DRAIN_EXPIRY_S
        while name in {one.server_id for one in servers}:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{name} did not answer within {DRAIN_EXPIRY_S} s; stop its process with "
                    "SIGTERM, which gives its samples back"
                )
            await asyncio.sleep(LOOK_S)
            servers = await registry.rollout_servers()
        return servers

    others = ask_run(arguments, lambda broker: drain(Registry(broker)))
    print(
        f"{name} takes no more samples; it finishes those it has within {timeout_s:g} s, gives "
        "back the rest and ends by itself"
    )
    if not others:
        print("it was the only rollout server: the run waits until another one joins")
    return 0
