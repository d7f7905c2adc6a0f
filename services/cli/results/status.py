"""`agent-r1 status RUN`: what a run and each of its services do now.

Reads the run folder, and of a run that is running what its services announce in Redis, what waits
in the streams between them, and what no service could process.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agent_r1.cli.live_run import (
    add_redis,
    ask,
    redis_of,
    run_config,
)
from agent_r1.cli.results.dead_letters import print_summary, with_stored
from agent_r1.config.host_settings import given_redis
from agent_r1.config.run import Config
from agent_r1.config.sources import ConfigError
from agent_r1.launch.local_view import in_line, read_json_lines, step_values, total_steps
from agent_r1.learner.checkpoints.ownership import writer_of
from agent_r1.learner.outcome import last_summary
from agent_r1.reward.components import ASKING
from agent_r1.runtime.durations import format_duration
from agent_r1.runtime.files.conditions import read_conditions
from agent_r1.runtime.files.run_folder import CONDITIONS_FILE, METRICS_FILE, running_launcher
from agent_r1_proto.dead_letters import DeadLetter
from agent_r1_proto.registry import Registry, ToolRegistry
from agent_r1_proto.scoring_models import ScoringModels
from agent_r1_proto.streams import Broker
from agent_r1_proto.tool_pool import PinReport, ToolState

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
    at_work = running_launcher(folder) is not None or writer_of(folder) is not None
    ended = None if at_work else _ended(folder)
    print(f"{config.run.id} in {folder}: {ended or _running(folder)}")
    for line in _last_step(folder, config):
        print(line)
    letters = with_stored(folder)
    if not ended:
        for line in _hindrances(folder):
            print(line)
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


def _hindrances(folder: Path) -> Iterator[str]:
    """Yield what is wrong with a run now, as its launcher and its learner see it."""
    for one in read_conditions(folder / CONDITIONS_FILE):
        # Whether Redis can be used is asked when it is read.
        if one.ended_at is None and not one.kind.startswith("redis:"):
            yield one.text()


def _ended(folder: Path) -> str | None:
    """Return how a run ended; None where no summary says so."""
    summary = last_summary(folder)
    if not summary:
        return None
    reason = f": {summary['reason']}" if summary.get("reason") else ""
    return f"{summary.get('status')}{reason}"


def _running(folder: Path) -> str:
    launcher = running_launcher(folder)
    if launcher is not None:
        return f"running ({launcher['pid']})"
    writer = writer_of(folder)
    if writer is not None:
        return f"running (the learner is {writer})"
    return "no launcher on this machine"


def _last_step(folder: Path, config: Config) -> Iterator[str]:
    steps = read_json_lines(folder / METRICS_FILE)
    if not steps:
        yield "no step has ended yet"
        return
    values = step_values(steps[-1], config.score_names(), total_steps(config), None)
    age = time.time() - (folder / METRICS_FILE).stat().st_mtime
    shown = in_line([(name, value) for name, value in values if name != "left"])
    yield f"{shown}  ({format_duration(age)} ago)"


async def _show(broker: Broker, pool: str) -> None:
    """Print what Redis knows of a run and of its tool pool."""
    streams: list[Row] = []
    for name, (stream, group) in broker.keys.stages().items():
        taken = await broker.pending(stream, group)
        waiting = max(0, await broker.depth(stream) - taken)
        streams.append((name, str(waiting), str(taken)))
    print_table(("stream", "waiting", "in work"), streams)
    await _show_servers(Registry(broker))
    await _show_tools(ToolRegistry(broker, pool))
    await _show_models(ScoringModels(broker))


async def _show_servers(registry: Registry) -> None:
    servers = await registry.rollout_servers()
    rows = [
        (one.server_id, str(one.policy_version), one.host, one.url, _since(one.started_at))
        for one in servers
    ]
    print_table(("rollout server", "policy version", "host", "url", "up"), rows)
    if not servers:
        print("no rollout server is announced: samples wait until one is")


async def _show_tools(registry: ToolRegistry) -> bool:
    """Print every instance with the share that its version is to get, and really gets.

    Returns:
        Whether there is one.
    """
    states, reports = await registry.read(), await registry.reports()
    rows: list[Row] = []
    for tool, state in sorted(states.items()):
        shares = state.shares()
        for one in state.instances:
            share, used = f"{shares.get(one.version, 0.0):.0%}", _used(tool, one.version, reports)
            does, up = "draining" if one.draining else "takes calls", _since(one.started_at)
            rows.append((tool, one.version, share, used, one.instance, does, one.url, up))
    print_table(("tool", "version", "share", "used", "instance", "state", "url", "up"), rows)
    for line in (*_refusals(reports), *_waiting(states)):
        print(line)
    return bool(rows)


async def _show_models(models: ScoringModels) -> None:
    """Print every version of the models that reward components ask."""
    rows: list[Row] = []
    for component in ASKING:
        used = await models.last_used(component)
        for place, one in enumerate(found := await models.read(component), 1):
            scores = "what comes" if place == len(found) else "groups it has begun"
            at = used.get(one.version)
            ago = "never" if at is None else f"{_since(at)} ago"
            rows.append((component, one.version, scores, ago, one.url))
    print_table(("component", "model", "scores", "used", "url"), rows)


def _since(at: float) -> str:
    return format_duration(time.time() - at)


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
