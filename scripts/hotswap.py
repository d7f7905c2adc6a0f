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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from agent_r1.cli import main as cli
from agent_r1_deploy.local_folder import live_redis_url
from agent_r1_proto.connection import RedisConnection
from agent_r1_proto.registry import ToolRegistry

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "tiny_world" / "run.toml"
COMMAND = str(Path(sys.executable).with_name("agent-r1"))
POOL = "hotswap"
GROUP_SIZE = 8
MIN_IN_FLIGHT = 32
MORE_STEPS_THAN_NEEDED = 100_000
INTERRUPTED = 130
QUIET_STEPS = 3
"""Steps before the first swap and after the last, for the latencies to compare with."""
LOOK_S = 0.05
EXPIRY_S = 2.0


class HotswapError(Exception):
    """The swaps could not be done as planned."""


@dataclass
class Instance:
    """One tool process this script started."""

    version: str
    process: subprocess.Popen[bytes]


@dataclass
class Swapper:
    """The instances of the search tool, and what was done to them."""

    run_dir: Path
    redis_url: str
    rollout_url: str
    scratch: Path
    world: Path
    delay_s: float
    """How long the tool takes to answer, beside its search."""
    instances: list[Instance] = field(default_factory=list)
    swaps: list[dict[str, Any]] = field(default_factory=list)
    newest: int = 1

    def in_flight(self) -> int:
        """Trajectories the rollout server works on."""
        return httpx.get(f"{self.rollout_url}/healthz", timeout=10).json()["in_flight"]

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
            async with await RedisConnection.connect(self.redis_url, POOL) as connection:
                states = await ToolRegistry(connection, POOL).read()
            return {one.pid: one.instance for state in states.values() for one in state.instances}

        return asyncio.run(read())

    def start(self, version: str) -> None:
        """Start an instance and wait until it is announced."""
        number = len(list(self.scratch.glob("*.toml")))
        config = self.scratch / f"tool{number}.toml"
        settings = {
            "config": str(CONFIG),
            "corpus": str(self.world / "corpus.jsonl"),
            "version": version,
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
        environment = os.environ | {"AGENT_R1__REDIS__URL": self.redis_url}
        process = subprocess.Popen(
            [COMMAND, "serve", "tool", str(config)], stdout=log, stderr=log, env=environment
        )
        self.instances.append(Instance(version, process))
        deadline = time.monotonic() + 60
        while process.pid not in self.announced():
            if process.poll() is not None or time.monotonic() > deadline:
                raise HotswapError(f"instance of version {version} did not come up; see {log.name}")
            time.sleep(LOOK_S)

    def of(self, version: str) -> list[Instance]:
        """Return the running instances of a version."""
        return [one for one in self.instances if one.version == version]

    def remove(self, instance: Instance, number: int) -> None:
        """End an instance: SIGKILL at once, SIGTERM in order."""
        instance.process.send_signal(number)
        instance.process.wait(timeout=60)
        self.instances.remove(instance)

    # The operations; each takes the pool from one useful state to the next.

    def upgrade(self) -> None:
        """Start the next version: new trajectories go there."""
        self.newest += 1
        self.start(str(self.newest))

    def add(self) -> None:
        """Start another instance of the newest version, or again what was killed."""
        self.start(str(self.newest))

    def kill_one(self) -> None:
        """Kill one of two instances of the newest version."""
        self.remove(self.of(str(self.newest))[0], signal.SIGKILL)

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
        for one in self.of(str(self.newest - 1)):
            name = self.announced()[one.process.pid]
            self.tools("drain", "search", "--instance", name)
            self.remove(one, signal.SIGTERM)

    def kill_version(self) -> None:
        """Kill every instance of the newest version: its trajectories must start again."""
        self.start(str(self.newest - 1))  # what takes over
        doomed = self.of(str(self.newest))
        for one in doomed:
            self.remove(one, signal.SIGKILL)
        while self.announced().keys() & {one.process.pid for one in doomed}:
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


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the steps so far."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def wait_for(what: str, condition: Callable[[], bool], run: subprocess.Popen[bytes]) -> None:
    """Wait while the run continues.

    Raises:
        HotswapError: the run ended first.
    """
    while not condition():
        if run.poll() is not None:
            raise HotswapError(f"the run ended before {what}; see its logs")
        time.sleep(LOOK_S)


def rollout_url(run_dir: Path) -> str:
    """Return the URL of the run's rollout server, "" before it is up."""
    launcher = run_dir / "launcher.json"
    if not launcher.exists():
        return ""
    state_dir = Path(json.loads(launcher.read_text(encoding="utf-8"))["state_dir"])
    announcement = state_dir / "announce" / "rollout" / "rollout.json"
    return json.loads(announcement.read_text())["url"] if announcement.exists() else ""


def swap(swapper: Swapper, run: subprocess.Popen[bytes], count: int) -> None:
    """Carry out `count` swaps, each with enough trajectories in flight."""
    operations = swapper.operations()
    for number in range(1, count + 1):
        name, operation = next(operations)
        load = 0

        def loaded() -> bool:
            nonlocal load
            load = swapper.in_flight()
            return load >= MIN_IN_FLIGHT

        wait_for(f"swap {number} of {count}", loaded, run)
        started = time.monotonic()
        step = len(metrics(swapper.run_dir))
        operation()
        took = time.monotonic() - started
        swapper.swaps.append({"swap": name, "in_flight": load, "step": step, "took_s": took})
        print(f"swap {number}/{count}  {name}  in flight {load}  step {step}", flush=True)


def report(swapper: Swapper, groups: int, steps: int, first: int, last: int) -> dict[str, Any]:
    """Read the trained trajectories back; the swaps took place between steps `first` and `last`."""
    trajectories = retried = violations = 0
    versions: set[str] = set()
    for step in range(1, steps + 1):
        file = swapper.run_dir / "trajectories" / f"step_{step:06d}.jsonl"
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if not record["trained"]:
                continue
            trajectories += 1
            retried += record["attempt"] > 0
            calls = [call for turn in record["turns"] for call in turn["calls"]]
            used = {call["version"] for call in calls if call["status"] == "ok"}
            versions |= used
            violations += len(used) > 1
    lines = metrics(swapper.run_dir)
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
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "hotswap")
    parser.add_argument("--world", type=Path, default=CONFIG.parent / "data", help="tiny_world")
    arguments = parser.parse_args()
    world = arguments.world.resolve()
    run_dir = arguments.out.resolve()
    shutil.rmtree(run_dir, ignore_errors=True)
    scratch = run_dir.with_name(f"{run_dir.name}-tools")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    run = start_run(run_dir, world, arguments.groups)
    swappers: list[Swapper] = []
    try:
        wait_for("its rollout server was up", lambda: bool(rollout_url(run_dir)), run)
        redis_url = live_redis_url(run_dir)
        assert redis_url is not None
        url, delay_s = rollout_url(run_dir), arguments.delay_s
        swapper = Swapper(run_dir, redis_url, url, scratch, world, delay_s)
        swappers.append(swapper)
        wait_for("the first swap", lambda: len(metrics(run_dir)) >= QUIET_STEPS, run)
        first = len(metrics(run_dir))
        swap(swapper, run, arguments.swaps)
        last = len(metrics(run_dir))
        enough = last + QUIET_STEPS
        wait_for("it was quiet again", lambda: len(metrics(run_dir)) >= enough, run)
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
        for one in (one for swapper in swappers for one in swapper.instances):
            one.process.kill()
            one.process.wait()
    found = report(swapper, arguments.groups, len(metrics(run_dir)), first, last)
    out = run_dir.with_suffix(".json")
    out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in found.items() if key != "log"}, indent=2))
    print(f"report: {out}")
    return 1 if found["lost"] or found["failed"] or found["pin_violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
