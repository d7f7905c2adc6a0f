"""`agent-r1 status RUN`: what a run and each of its services do now.

Reads the run folder, and of a run that is running what its services announce in Redis, what waits
in the streams between them, and what no service could process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_r1.cli.live_run import add_redis, ask
from agent_r1.cli.results.dead_letters import print_summary, with_stored
from agent_r1.config.host_settings import given_redis
from agent_r1.config.live_run import redis_of, run_config
from agent_r1.config.sources import ConfigError
from agent_r1.console.control.services import (
    read_models,
    read_servers,
    read_streams,
    read_tools,
    since,
)
from agent_r1.console.run_state import read_run_state
from agent_r1.launch.local_view import in_line, total_steps
from agent_r1_proto.dead_letters import DeadLetter
from agent_r1_proto.registry import ToolRegistry
from agent_r1_proto.streams import Broker

UNCUT_WIDTH = 400
Row = tuple[str, ...]


def status_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `status`."""
    parser.add_argument("run_folder", type=Path, nargs="?", metavar="RUN", help="run folder")
    add_redis(parser)
    pool_help = "tool pool, if it is not the run's own (run.tool_pool)"
    parser.add_argument("--pool", metavar="NAME", help=pool_help)


def status(arguments: argparse.Namespace) -> int:
    """Print what a run and its services are doing, or how it ended.

    That is its last step, what waits in its streams, every rollout server, every tool instance with
    the share of its version, the models that reward components ask, and the newest messages that
    could not be processed. Name the run by its folder, or by --redis and --id; --redis and --pool
    alone show the tools of a pool.
    """
    folder: Path | None = arguments.run_folder
    if folder is None:
        return _status_in_redis(arguments)
    config = run_config(folder)
    state = read_run_state(folder)
    print(f"{config.run.id} in {folder}: {state.text}")
    values = state.values(config, total_steps(config))
    print(f"{in_line(values)}  ({state.age} ago)" if values else "no step has ended yet")
    letters = with_stored(folder)
    if not state.has_ended:
        for one in state.hindrances:
            print(one.text())
        url = redis_of(folder, config) if arguments.redis is None else given_redis(arguments.redis)
        if url is not None:
            pool = arguments.pool or config.run.tool_pool or config.run.id

            async def show(broker: Broker) -> list[DeadLetter]:
                await _show(broker, pool)
                return with_stored(folder, await broker.dead_letters())

            letters = ask(url, arguments.id or config.run.id, show, "redis.url")
    print_summary(letters)
    return 0


def _status_in_redis(arguments: argparse.Namespace) -> int:
    """Print what a Redis knows of a run, or of a pool of tools alone."""
    run_id: str | None = arguments.id
    pool: str | None = arguments.pool or run_id
    if arguments.redis is None or pool is None:
        raise ConfigError("name a run folder, or give --redis with --id or --pool")

    async def show(broker: Broker) -> None:
        if run_id is not None and await broker.knows_run():
            await _show(broker, pool)
            print_summary(await broker.dead_letters())
        # Tools may be up before anything else of their run is.
        elif not await _show_tools(ToolRegistry(broker, pool)):
            print(
                f"no tool instance is announced in the pool {pool!r}"
                if run_id is None
                else f"Redis has nothing of a run {run_id!r} (--id): no rollout server is "
                "announced, and no sample waits"
            )

    ask(given_redis(arguments.redis), run_id or "tools", show)
    return 0


async def _show(broker: Broker, pool: str) -> None:
    """Print what Redis knows of a run and of its tool pool."""
    streams = [(s.name, str(s.waiting), str(s.taken)) for s in await read_streams(broker)]
    print_table(("stream", "waiting", "in work"), streams)
    servers = await read_servers(broker)
    rows = [
        (one.server_id, str(one.policy_version), one.host, one.url, since(one.started_at))
        for one in servers
    ]
    print_table(("rollout server", "policy version", "host", "url", "up"), rows)
    if not servers:
        print("no rollout server is announced: samples wait until one is")
    await _show_tools(ToolRegistry(broker, pool))
    models = [
        (one.component, one.version, one.scores, one.used, one.url)
        for one in await read_models(broker)
    ]
    print_table(("component", "model", "scores", "used", "url"), models)


async def _show_tools(registry: ToolRegistry) -> bool:
    """Print every instance of a pool.

    Returns:
        Whether there is one.
    """
    tools = await read_tools(registry)
    rows: list[Row] = []
    for row in tools.rows:
        one = row.instance
        does = "draining" if one.draining else "takes calls"
        shares = (row.tool, row.version, row.share, row.used)
        rows.append((*shares, one.instance, does, one.url, since(one.started_at)))
    print_table(("tool", "version", "share", "used", "instance", "state", "url", "up"), rows)
    for line in tools.notes:
        print(line)
    return bool(rows)


def print_table(columns: Row, rows: Sequence[Row]) -> None:
    """Print a table that has rows; in a log or a pipe nothing is cut, so that it can be copied."""
    if not rows:
        return
    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else UNCUT_WIDTH).print(table)
