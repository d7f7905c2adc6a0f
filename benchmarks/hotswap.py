"""Swaps of tool services while a run trains through them: nothing may be lost.

    make hotswap ARGS="--swaps 50 --groups 16 --wait-s 0.05 --world FOLDER"

Starts `agent-r1 train` on tiny_world with every service, and then adds, upgrades, weighs, rolls
back, drains, kills and restarts instances of its search tool, each time with at least 32
trajectories in flight; then it stops the run. Every trained trajectory is read back. The exit
status is 1 when something was lost or a pin was broken. `--wait-s` is how long the tool takes to
answer, beside its search; before the first swap and after the last come `--quiet-steps`, for the
latencies to compare with.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from agent_r1.cli import main as cli
from agent_r1.runs.store import stored_files
from agent_r1.runtime.exit_status import EXIT_INTERRUPTED
from agent_r1.runtime.files.run_folder import live_redis_url, running_launcher
from agent_r1_proto.connection import RedisConnection
from agent_r1_proto.registry import ToolRegistry
from benchmarks.harness import OUT, Row, read_options, write_report
from benchmarks.processes import (
    NO_EVALUATION,
    PLUGINS,
    POLL_S,
    make_world,
    process,
    read_json_lines,
    train_command,
)

RUN_DIR = OUT / "hotswap"
SCRATCH = OUT / "hotswap-tools"
AGENT_R1 = Path(sys.executable).with_name("agent-r1")
POOL = "hotswap"
GROUP_SIZE = 8
MIN_IN_FLIGHT = 32
MORE_STEPS_THAN_NEEDED = 100_000
ANNOUNCEMENT = Path("announce", "rollout", "rollout.json")
"""In the private folder of the run's launcher."""
EXPIRY_S = 2.0
START_TIMEOUT_S = 60.0
OPERATIONS = (
    *("upgrade", "canary", "rollback", "forward", "add", "kill_one"),
    *("add", "upgrade", "add", "drain_old", "kill_version", "add"),
)
"""Methods of `Swapper`, in an order in which each is possible, again and again."""


class Swapper(contextlib.ExitStack):
    """A run, and the instances of its search tool that were started here, by their version."""

    def __init__(self, run: psutil.Popen, corpus: Path, wait_s: float) -> None:
        super().__init__()
        self._run = run
        self._settings = {"corpus": str(corpus), "waits_s": [wait_s]}
        self._instances: dict[int, list[psutil.Popen]] = defaultdict(list)
        self._numbers = itertools.count()
        self._newest = 1

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait while the run continues.

        Raises:
            SystemExit: the run ended first.
        """
        while not condition():
            if self._run.poll() is not None:
                sys.exit(f"hotswap: the run ended before {what}; see {RUN_DIR / 'logs'}")
            time.sleep(POLL_S)

    def wait_for_steps(self, count: int) -> int:
        """Wait until the run has done so many steps; return how many it has done."""
        self.wait_for(f"step {count}", lambda: len(read_steps()) >= count)
        return len(read_steps())

    def _tools(self, *words: str) -> None:
        """Run `agent-r1 tools`."""
        command = ["tools", *words, "--run", str(RUN_DIR), "--pool", POOL]
        with contextlib.redirect_stdout(io.StringIO()):
            status = cli.main(command)
        if status != 0:
            sys.exit(f"hotswap: agent-r1 {' '.join(command)} ended with status {status}")

    def _announced(self) -> dict[int, str]:
        """Return the names of the announced instances, by process id."""

        async def read() -> dict[int, str]:
            async with await RedisConnection.connect(redis_url(), POOL) as connection:
                states = await ToolRegistry(connection, POOL).read()
            return {one.pid: one.instance for state in states.values() for one in state.instances}

        return asyncio.run(read())

    def _start(self, version: int) -> None:
        """Start an instance and wait until it is announced."""
        number = next(self._numbers)
        config = SCRATCH / f"tool{number}.toml"
        settings = self._settings | {"version": str(version)}
        inline = ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
        config.write_text(
            f'run = {{id = "hotswap", tool_pool = "{POOL}", plugins = ["{PLUGINS}"]}}\n'
            'model = {path = "none"}\n'
            '[tools.search]\ntype = "bench_tools:SlowSearch"\n'
            f"announce_expiry_s = {EXPIRY_S}\nsettings = {{{inline}}}\n"
        )
        log = self.enter_context((SCRATCH / f"tool{number}.log").open("wb"))
        options: dict[str, Any] = {"stdout": log, "stderr": log}
        options["env"] = os.environ | {"AGENT_R1__REDIS__URL": redis_url()}
        command = process(AGENT_R1, "serve", "tool", config, **options)
        instance = self.enter_context(command)
        self._instances[version].append(instance)
        deadline = time.monotonic() + START_TIMEOUT_S
        while instance.pid not in self._announced():
            if instance.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"hotswap: version {version} did not come up; see {log.name}")
            time.sleep(POLL_S)

    def _end(self, version: int, instance: psutil.Popen, number: int) -> None:
        """End an instance: SIGKILL at once, SIGTERM in order."""
        instance.send_signal(number)
        instance.wait(60)
        self._instances[version].remove(instance)

    # The operations; each takes the pool from one useful state to the next.

    def upgrade(self) -> None:
        """Start the next version: new trajectories go there."""
        self._newest += 1
        self.add()

    def add(self) -> None:
        """Start another instance of the newest version, or again what was killed."""
        self._start(self._newest)

    def kill_one(self) -> None:
        """Kill one of two instances of the newest version."""
        self._end(self._newest, self._instances[self._newest][0], signal.SIGKILL)

    def canary(self) -> None:
        """Give the newest version a quarter, the one before the rest."""
        self._tools("weight", "search", f"{self._newest}=1", f"{self._newest - 1}=3")

    def forward(self) -> None:
        """Give everything to the newest version again."""
        self._tools("weight", "search", "--newest")

    def rollback(self) -> None:
        """Give everything to the version before."""
        self.forward()
        self._tools("rollback", "search")

    def drain_old(self) -> None:
        """Drain the instances of the version before, and stop them once nobody needs them."""
        version = self._newest - 1
        for instance in list(self._instances[version]):
            self._tools("drain", "search", "--instance", self._announced()[instance.pid])
            self._end(version, instance, signal.SIGTERM)

    def kill_version(self) -> None:
        """Kill every instance of the newest version: its trajectories must start again."""
        self._start(self._newest - 1)  # what takes over
        doomed = list(self._instances[self._newest])
        for instance in doomed:
            self._end(self._newest, instance, signal.SIGKILL)
        pids = {instance.pid for instance in doomed}
        self.wait_for("dead tools were forgotten", lambda: not self._announced().keys() & pids)


def redis_url() -> str:
    """Return the address of the run's Redis."""
    return live_redis_url(RUN_DIR) or sys.exit("hotswap: the run has no Redis; see its logs")


def read_steps() -> list[dict[str, Any]]:
    """Return the metrics of the steps so far."""
    return read_json_lines(RUN_DIR / "metrics.jsonl")


def in_flight() -> int:
    """Return the trajectories the rollout server works on; 0 before it is up."""
    launcher = running_launcher(RUN_DIR)
    announcement = Path(launcher["state_dir"]) / ANNOUNCEMENT if launcher else None
    if announcement is None or not announcement.exists():
        return 0
    url = json.loads(announcement.read_text(encoding="utf-8"))["url"]
    return httpx.get(f"{url}/healthz", timeout=10).json()["in_flight"]


def swap(swapper: Swapper, count: int) -> list[Row]:
    """Carry out `count` swaps, each with enough trajectories in flight; return what was done."""
    done: list[Row] = []
    for name in itertools.islice(itertools.cycle(OPERATIONS), count):
        load = 0

        def loaded() -> bool:
            nonlocal load
            load = in_flight()
            return load >= MIN_IN_FLIGHT

        swapper.wait_for(f"swap {len(done) + 1} of {count}", loaded)
        done.append({"swap": name, "in_flight": load, "step": len(read_steps())})
        started = time.monotonic()
        getattr(swapper, name)()
        done[-1]["took_s"] = time.monotonic() - started
        print(f"{len(done)}/{count}: {done[-1]}", flush=True)
    return done


def read_back(groups: int, first: int, last: int) -> Row:
    """Read the trained trajectories; the swaps took place between steps `first` and `last`."""
    steps = read_steps()
    stored = (record for file in stored_files(RUN_DIR) for record in file.records())
    records = [record for record in stored if record["trained"]]
    used = [
        {
            call["version"]
            for turn in one["turns"]
            for call in turn["calls"]
            if call["status"] == "ok"
        }
        for one in records
    ]
    failed = int(steps[-1]["results/failed"])
    missing = len(steps) * groups * GROUP_SIZE - len(records)

    def latency_ms(begin: int, end: int) -> float:
        return statistics.fmean(line["tools/latency_ms_mean"] for line in steps[begin:end])

    return {
        "steps": len(steps),
        "trained": len(records),
        "started again": sum(record["attempt"] > 0 for record in records),
        "failed for good": failed,
        "lost": max(0, missing - failed),
        "pins broken": sum(len(versions) > 1 for versions in used),
        "versions": len(set().union(*used)),
        "ms of a call before": latency_ms(0, first),
        "during": latency_ms(first, max(last, first + 1)),
        "after": latency_ms(last, len(steps)),
    }


def main() -> None:
    """Swap, and write the report; exit with 1 where something was lost."""
    options = read_options(__doc__, swaps=50, groups=16, wait_s=0.05, quiet_steps=3, world="")
    world = Path(options.world).resolve() if options.world else make_world()
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(parents=True)
    settings = {
        **NO_EVALUATION,
        "run.tool_pool": POOL,
        "data.train": json.dumps([str(world / "train.jsonl")]),
        "tools.search.corpus": world / "corpus.jsonl",
        "tools.search.announce_expiry_s": EXPIRY_S,
        "learner.steps": MORE_STEPS_THAN_NEEDED,
        "learner.max_staleness": 4,  # training must not wait for trajectories that start again
        "learner.groups_per_batch": options.groups,
        "learner.group_size": GROUP_SIZE,
        "learner.trajectories_per_step": options.groups * GROUP_SIZE,  # every one is written
    }
    with (
        process(*train_command(RUN_DIR, settings)) as run,
        Swapper(run, world / "corpus.jsonl", options.wait_s) as swapper,
    ):
        first = swapper.wait_for_steps(options.quiet_steps)
        done = swap(swapper, options.swaps)
        last = len(read_steps())
        swapper.wait_for_steps(last + options.quiet_steps)
        run.send_signal(signal.SIGINT)
        if run.wait() != EXIT_INTERRUPTED:
            sys.exit(f"hotswap: the run failed; see {RUN_DIR / 'logs'}")
    least = min(one["in_flight"] for one in done)
    row = {"swaps": len(done), "least in flight": least, **read_back(options.groups, first, last)}
    write_report("hotswap", [row], log=done)
    sys.exit(1 if row["lost"] or row["failed for good"] or row["pins broken"] else 0)


if __name__ == "__main__":
    main()
