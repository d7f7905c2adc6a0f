"""Swaps tool services while a run trains through them, and proves that nothing is lost.

    python scripts/hotswap.py [--swaps 50] [--groups 16] [--delay-s 0.05] [--out runs/hotswap]
        [--world DIR]

Starts `agent-r1 train` on tiny_world with every service, and then adds, upgrades, weighs, rolls
back, drains, kills and restarts instances of its search tool, each time with at least 32
trajectories in flight; then it stops the run. Every trained trajectory is read back. The report is
OUT.json; the exit status is 1 when something was lost or a pin was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from agent_r1.cli import main as cli
from agent_r1.runtime.files.json_lines import split_lines
from agent_r1.runtime.files.run_folder import live_redis_url, running_launcher
from agent_r1_proto.connection import RedisConnection
from agent_r1_proto.registry import ToolRegistry

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "tiny_world" / "run.toml"
OUT = ROOT / "runs" / "hotswap"
COMMAND = str(Path(sys.executable).with_name("agent-r1"))
POOL = "hotswap"
GROUP_SIZE = 8
MIN_IN_FLIGHT = 32
MORE_STEPS_THAN_NEEDED = 100_000
INTERRUPTED = 130
QUIET_STEPS = 3
"""Steps before the first swap and after the last, for the latencies to compare with."""
LOOK_S = 0.05
ANNOUNCEMENT = Path("announce", "rollout", "rollout.json")
"""In the private folder of the run's launcher."""
EXPIRY_S = 2.0


class HotswapError(Exception):
    """The swaps could not be done as planned."""


@dataclass
class Swapper:
    """A run, the instances of its search tool, and what was done to them."""

    run_dir: Path
    run: subprocess.Popen[bytes]
    scratch: Path
    world: Path
    delay_s: float
    """How long the tool takes to answer, beside its search."""
    instances: dict[int, list[subprocess.Popen[bytes]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Processes that this script has started, by the version they serve."""
    swaps: list[dict[str, Any]] = field(default_factory=list)
    newest: int = 1

    def metrics(self) -> list[dict[str, Any]]:
        """Return the steps so far."""
        file = self.run_dir / "metrics.jsonl"
        lines = split_lines(file.read_text(encoding="utf-8")) if file.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait while the run continues.

        Raises:
            HotswapError: the run ended first.
        """
        while not condition():
            if self.run.poll() is not None:
                raise HotswapError(f"the run ended before {what}; see its logs")
            time.sleep(LOOK_S)

    def wait_for_steps(self, count: int, what: str) -> int:
        """Wait until the run has done so many steps; return how many it has done."""
        self.wait_for(what, lambda: len(self.metrics()) >= count)
        return len(self.metrics())

    def in_flight(self) -> int:
        """Trajectories the rollout server works on; 0 before it is up."""
        launcher = running_launcher(self.run_dir)
        announcement = Path(launcher["state_dir"]) / ANNOUNCEMENT if launcher else None
        if announcement is None or not announcement.exists():
            return 0
        url = json.loads(announcement.read_text(encoding="utf-8"))["url"]
        return httpx.get(f"{url}/healthz", timeout=10).json()["in_flight"]

    def redis_url(self) -> str:
        """Return the address of the run's Redis."""
        url = live_redis_url(self.run_dir)
        if url is None:
            raise HotswapError("the run has no Redis any more; see its logs")
        return url

    def tools(self, *words: str) -> None:
        """Run `agent-r1 tools`."""
        command = ["tools", *words, "--run", str(self.run_dir), "--pool", POOL]
        with contextlib.redirect_stdout(io.StringIO()):
            status = cli.main(command)
        if status != 0:
            raise HotswapError(f"agent-r1 {' '.join(command)} ended with status {status}")

    def announced(self) -> dict[int, str]:
        """Return the names of the announced instances, by process id."""

        async def read() -> dict[int, str]:
            async with await RedisConnection.connect(self.redis_url(), POOL) as connection:
                states = await ToolRegistry(connection, POOL).read()
            return {one.pid: one.instance for state in states.values() for one in state.instances}

        return asyncio.run(read())

    def start(self, version: int) -> None:
        """Start an instance and wait until it is announced."""
        number = len(list(self.scratch.glob("*.toml")))
        config = self.scratch / f"tool{number}.toml"
        settings = {
            "config": str(CONFIG),
            "corpus": str(self.world / "corpus.jsonl"),
            "version": str(version),
            "delay_s": self.delay_s,
        }
        inline = ", ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
        config.write_text(
            f'[run]\nid = "hotswap"\ntool_pool = "{POOL}"\nplugins = ["{ROOT / "scripts"}"]\n'
            '[model]\npath = "none"\n'
            '[tools.search]\ntype = "hotswap_tool:VersionedSearch"\n'
            f"announce_expiry_s = {EXPIRY_S}\nsettings = {{ {inline} }}\n"
        )
        log = (self.scratch / f"tool{number}.log").open("wb")
        environment = os.environ | {"AGENT_R1__REDIS__URL": self.redis_url()}
        process = subprocess.Popen(
            [COMMAND, "serve", "tool", str(config)], stdout=log, stderr=log, env=environment
        )
        self.instances[version].append(process)
        deadline = time.monotonic() + 60
        while process.pid not in self.announced():
            if process.poll() is not None or time.monotonic() > deadline:
                raise HotswapError(f"instance of version {version} did not come up; see {log.name}")
            time.sleep(LOOK_S)

    def remove(self, version: int, process: subprocess.Popen[bytes], number: int) -> None:
        """End an instance: SIGKILL at once, SIGTERM in order."""
        process.send_signal(number)
        process.wait(timeout=60)
        self.instances[version].remove(process)

    # The operations; each takes the pool from one useful state to the next.

    def upgrade(self) -> None:
        """Start the next version: new trajectories go there."""
        self.newest += 1
        self.start(self.newest)

    def add(self) -> None:
        """Start another instance of the newest version, or again what was killed."""
        self.start(self.newest)

    def kill_one(self) -> None:
        """Kill one of two instances of the newest version."""
        self.remove(self.newest, self.instances[self.newest][0], signal.SIGKILL)

    def canary(self) -> None:
        """Give the newest version a quarter, the one before the rest."""
        self.tools("weight", "search", f"{self.newest}=1", f"{self.newest - 1}=3")

    def forward(self) -> None:
        """Give everything to the newest version again."""
        self.tools("weight", "search", "--newest")

    def rollback(self) -> None:
        """Give everything to the version before."""
        self.forward()
        self.tools("rollback", "search")

    def drain_old(self) -> None:
        """Drain the instances of the version before, and stop them once nobody needs them."""
        version = self.newest - 1
        for process in list(self.instances[version]):
            self.tools("drain", "search", "--instance", self.announced()[process.pid])
            self.remove(version, process, signal.SIGTERM)

    def kill_version(self) -> None:
        """Kill every instance of the newest version: its trajectories must start again."""
        self.start(self.newest - 1)  # what takes over
        doomed = list(self.instances[self.newest])
        for process in doomed:
            self.remove(self.newest, process, signal.SIGKILL)
        while self.announced().keys() & {process.pid for process in doomed}:
            time.sleep(LOOK_S)

    def operations(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield operations forever, in an order in which each is possible."""
        for name in itertools.cycle(
            (
                *("upgrade", "add", "upgrade", "canary", "rollback", "forward", "add", "kill_one"),
                *("add", "drain_old", "kill_version", "add"),
            )
        ):
            yield name, getattr(self, name)


def start_run(run_dir: Path, world: Path, groups: int) -> subprocess.Popen[bytes]:
    """Start training; every trained trajectory is written to the run folder."""
    settings = {
        "run.tool_pool": POOL,
        "data.train": json.dumps([str(world / "train.jsonl")]),
        "evaluation.sets": "{}",
        "tools.search.corpus": str(world / "corpus.jsonl"),
        "tools.search.announce_expiry_s": str(EXPIRY_S),
        "learner.steps": str(MORE_STEPS_THAN_NEEDED),
        # Training must not wait for trajectories that start again.
        "learner.max_staleness": "4",
        "learner.groups_per_batch": str(groups),
        "learner.group_size": str(GROUP_SIZE),
        "learner.trajectories_per_step": str(groups * GROUP_SIZE),
        "learner.checkpoint_every": "0",
        "evaluation.every": "0",
    }
    command = [COMMAND, "train", str(CONFIG), "--run-dir", str(run_dir)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return subprocess.Popen(command)


def swap(swapper: Swapper, count: int) -> None:
    """Carry out `count` swaps, each with enough trajectories in flight."""
    for number, (name, operation) in enumerate(itertools.islice(swapper.operations(), count), 1):
        loads: list[int] = []

        def loaded(loads: list[int] = loads) -> bool:
            loads.append(swapper.in_flight())
            return loads[-1] >= MIN_IN_FLIGHT

        swapper.wait_for(f"swap {number} of {count}", loaded)
        load, step = loads[-1], len(swapper.metrics())
        started = time.monotonic()
        operation()
        took = time.monotonic() - started
        swapper.swaps.append({"swap": name, "in_flight": load, "step": step, "took_s": took})
        print(f"swap {number}/{count}  {name}  in flight {load}  step {step}", flush=True)


def report(swapper: Swapper, groups: int, first: int, last: int) -> dict[str, Any]:
    """Read the trained trajectories back; the swaps took place between steps `first` and `last`."""
    lines = swapper.metrics()
    steps = len(lines)
    trajectories = retried = violations = 0
    versions: set[str] = set()
    for step in range(1, steps + 1):
        file = swapper.run_dir / "trajectories" / f"step_{step:06d}.jsonl"
        for line in split_lines(file.read_text(encoding="utf-8")):
            record = json.loads(line)
            if not record["trained"]:
                continue
            trajectories += 1
            retried += record["attempt"] > 0
            calls = [call for turn in record["turns"] for call in turn["calls"]]
            used = {call["version"] for call in calls if call["status"] == "ok"}
            versions |= used
            violations += len(used) > 1
    failed = int(lines[-1]["results/failed"])
    missing = steps * groups * GROUP_SIZE - trajectories

    def latency(begin: int, end: int) -> float:
        values = [line["tools/latency_ms_mean"] for line in lines[begin:end]]
        return round(statistics.fmean(values), 1) if values else float("nan")

    return {
        "steps": steps,
        "swaps": len(swapper.swaps),
        "in_flight_min": min(one["in_flight"] for one in swapper.swaps),
        "trajectories": trajectories,
        "retried": retried,
        "failed": failed,
        "lost": max(0, missing - failed),
        "pin_violations": violations,
        "versions": len(versions),
        "latency_ms_before": latency(0, first),
        "latency_ms_during": latency(first, last),
        "latency_ms_after": latency(last, steps),
        "log": swapper.swaps,
    }


def main() -> int:
    """Swap, and write the report."""
    parser = argparse.ArgumentParser(description="Swap tools while training runs.")
    parser.add_argument("--swaps", type=int, default=50)
    parser.add_argument("--groups", type=int, default=16, help="groups of 8 in a batch")
    delay_help = "how long the tool takes to answer, beside its search"
    parser.add_argument("--delay-s", type=float, default=0.05, help=delay_help)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--world", type=Path, default=CONFIG.parent / "data", help="tiny_world")
    arguments = parser.parse_args()
    world = arguments.world.resolve()
    run_dir = arguments.out.resolve()
    scratch = run_dir.with_name(f"{run_dir.name}-tools")
    for folder in (run_dir, scratch):
        if arguments.out != OUT and folder.is_dir() and any(folder.iterdir()):
            parser.error(f"{folder} is not empty; name another folder with --out")
        shutil.rmtree(folder, ignore_errors=True)
    scratch.mkdir(parents=True)
    run = start_run(run_dir, world, arguments.groups)
    swapper = Swapper(run_dir, run, scratch, world, arguments.delay_s)
    try:
        first = swapper.wait_for_steps(QUIET_STEPS, "the first swap")
        swap(swapper, arguments.swaps)
        last = len(swapper.metrics())
        swapper.wait_for_steps(last + QUIET_STEPS, "it was quiet again")
        run.send_signal(signal.SIGINT)
        if run.wait() != INTERRUPTED:
            raise HotswapError(f"the run failed; see {run_dir / 'logs'}")
    except HotswapError as exc:
        print(f"hotswap: {exc}", file=sys.stderr)
        return 1
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
            run.wait()
        for process in itertools.chain(*swapper.instances.values()):
            process.kill()
            process.wait()
    found = report(swapper, arguments.groups, first, last)
    out = run_dir.with_suffix(".json")
    out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in found.items() if key != "log"}, indent=2))
    print(f"report: {out}")
    return 1 if found["lost"] or found["failed"] or found["pin_violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
