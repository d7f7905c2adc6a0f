"""`agent-r1 status RUN`: what a run and each of its services do now.

Reads the run folder, and of a run that is running what its services announce in Redis and what
waits in the streams between them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agent_r1.cli.live_run import ask, redis_of, run_config
from agent_r1.cli.services.tools import print_table
from agent_r1.config.run import Config
from agent_r1.launch.local_view import in_line, read_json_lines, step_values, total_steps
from agent_r1.learner.checkpoints.ownership import writer_of
from agent_r1.learner.outcome import last_summary
from agent_r1.runtime.durations import format_duration
from agent_r1.runtime.files.conditions import read_conditions
from agent_r1.runtime.files.run_folder import CONDITIONS_FILE, METRICS_FILE, running_launcher
from agent_r1_proto.registry import Registry, RolloutServer, ToolRegistry
from agent_r1_proto.streams import Broker
from agent_r1_proto.tool_pool import ToolInstance


@dataclass(frozen=True)
class _Live:
    """What Redis knows of a run."""

    streams: list[tuple[str, int, int]]
    """Name, entries that nobody has taken, entries that are being worked on."""
    servers: list[RolloutServer]
    tools: list[ToolInstance]
    dead_letters: int


def status(arguments: argparse.Namespace) -> int:
    """Print what a run does, or how it ended."""
    folder: Path = arguments.run_folder
    config = run_config(folder)
    at_work = running_launcher(folder) is not None or writer_of(folder) is not None
    ended = None if at_work else _ended(folder)
    print(f"{config.run.id} in {folder}: {ended or _running(folder)}")
    for line in _last_step(folder, config):
        print(line)
    if ended:
        return 0
    for line in _hindrances(folder):
        print(line)
    url = redis_of(folder, config)
    if url is not None:
        _show(ask(url, config.run.id, lambda broker: _look(broker, config), "redis.url"))
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


async def _look(broker: Broker, config: Config) -> _Live:
    streams: list[tuple[str, int, int]] = []
    for name, (stream, group) in broker.keys.stages().items():
        taken = await broker.pending(stream, group)
        streams.append((name, max(0, await broker.depth(stream) - taken), taken))
    pool = ToolRegistry(broker, config.run.tool_pool or config.run.id)
    states = await pool.read(list(config.tools))
    return _Live(
        streams=streams,
        servers=await Registry(broker).rollout_servers(),
        tools=[one for state in states.values() for one in state.instances],
        dead_letters=await broker.dead_letter_count(),
    )


def _show(live: _Live) -> None:
    rows = [(name, str(waiting), str(taken)) for name, waiting, taken in live.streams]
    print_table(("stream", "waiting", "in work"), rows)
    now = time.time()
    services = [
        ("rollout", one.server_id, f"policy version {one.policy_version}", one.url, one.started_at)
        for one in live.servers
    ]
    for one in live.tools:
        does = f"version {one.version}" + (", draining" if one.draining else "")
        services.append((one.tool, one.instance, does, one.url, one.started_at))
    rows = [(*row[:4], format_duration(now - row[4])) for row in services]
    print_table(("service", "instance", "state", "url", "up"), rows)
    if not live.servers:
        print("no rollout server is announced: samples wait until one is")
    if live.dead_letters:
        print(f"{live.dead_letters} dead letters; see `agent-r1 dead-letters list`")
