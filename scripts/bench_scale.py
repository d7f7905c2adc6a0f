"""Cost per trajectory with 1 to 64 rollout servers, and many trajectories in flight.

    python scripts/bench_scale.py [--servers 1,4,16,64] [--in-flight 16000] [--rounds 3]

Rollout servers whose policy is a script (one turn of 60 tokens, half a second each) work through a
real Redis for a real reward worker; this process asks for samples and takes the scores, as a
learner does. Several servers share a process, up to 16 of them. Cost is CPU time of all processes
and Redis together, between the first sample and the last score. Whatever the number of servers, 512
trajectories are in flight, so what grows with it is the work that servers make by being there.
Rounds alternate between the numbers of servers.

Then 64 servers hold `--in-flight` trajectories at once: the command states the memory of Redis and
of the servers, and what it comes to for each trajectory. Writes runs/bench/scale.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from bench_rollout import BASE, process
from bench_tools import entry, print_entries
from process_memory import pss_gb

from agent_r1.config.redis_server import find_redis_server
from agent_r1.launch.local_redis import free_port
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.reward.worker import RewardWorker
from agent_r1.rollout.config import EnvConfig, RolloutConfig
from agent_r1.rollout.main import RolloutSettings, build_chat_format, serve_policy
from agent_r1.rollout.policy import EngineWork
from agent_r1.runtime.config import ModelConfig, RedisConfig, RunConfig
from agent_r1.text.sampler import Generation
from agent_r1_proto.registry import Registry
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutKey, RolloutTask, Task
from agent_r1_proto.trajectory import VersionSpan
from agent_r1_proto.weights import NewestVersion

OUT = Path(__file__).resolve().parent.parent / "runs" / "bench" / "scale.json"
END_ID = 2
TURN_TOKENS = 60
IN_FLIGHT = 512
SAMPLES = 4096
SERVERS_A_PROCESS = 16
TURN_S = 0.5
HOLD_S = 20.0
GOAL = 1.2
TIMEOUT_S = 900.0


class ScriptedPolicy:
    """Answers every prompt with the same turn, after a wait."""

    policy_version = 0
    eos_token_ids = (END_ID,)
    max_context = 1024
    num_in_flight = 0
    is_loading = False
    death = None

    def __init__(self, turn: list[int], shortest_s: float, longest_s: float) -> None:
        self.work = EngineWork()
        self._turn = turn
        self._between = shortest_s, longest_s

    async def start(self) -> None:
        """Be ready."""

    async def generate(self, token_ids: list[int], **options: Any) -> Generation:
        """Wait, and answer."""
        await asyncio.sleep(random.uniform(*self._between))
        count = len(self._turn)
        spans = [VersionSpan(policy_version=0, start=0, end=count)]
        return Generation(list(self._turn), [-0.5] * count, spans, "stop")

    async def probe(self) -> None:
        """Work."""

    async def stop(self) -> None:
        """End."""


async def serve_many(settings: dict[str, Any]) -> None:
    """Run some rollout servers in this process until it is told to end."""
    env = EnvConfig(max_turns=1)
    chat = build_chat_format(env, str(BASE), (END_ID,), has_tools=False)
    text = chat.encode_text("<think> one plan.</think><answer> x</answer>")
    turn = (text * TURN_TOKENS)[: TURN_TOKENS - len(text) - 1] + list(text) + [END_ID]
    rollout = RolloutSettings(
        run=RunConfig(id="bench"),
        model=ModelConfig(path=str(BASE), max_context=1024),
        redis=RedisConfig(url=settings["redis_url"]),
        env=env,
        rollout=RolloutConfig(max_concurrent=settings["max_concurrent"]),
        tools={},
        weights_dir=Path(settings["folder"]),
    )
    between = settings["shortest_s"], settings["longest_s"]
    servers = asyncio.gather(
        *(serve_policy(_policy(turn, *between), chat, rollout) for _ in range(settings["servers"]))
    )
    await asyncio.sleep(0)  # each has set a handler of its own, and one would stop
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, servers.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await servers


def _policy(turn: list[int], shortest_s: float, longest_s: float) -> Any:
    return ScriptedPolicy(turn, shortest_s, longest_s)


class Fleet(contextlib.ExitStack):
    """Rollout servers in processes of their own."""

    def __init__(self, folder: Path, redis_url: str, redis_pid: int) -> None:
        super().__init__()
        self._folder = folder
        self._redis_url = redis_url
        self._redis = psutil.Process(redis_pid)
        self._processes: list[psutil.Process] = []

    async def start(self, registry: Registry, count: int, **settings: Any) -> None:
        """Start so many servers and wait until all are announced."""
        number = 0
        while number < count:
            here = min(SERVERS_A_PROCESS, count - number)
            file = self._folder / f"servers-{number}.json"
            values = {"redis_url": self._redis_url, "folder": str(self._folder), "servers": here}
            file.write_text(json.dumps(values | settings), encoding="utf-8")
            running = self.enter_context(process(sys.executable, __file__, "--serve", file))
            self._processes.append(psutil.Process(running.pid))
            number += here
        async with asyncio.timeout(TIMEOUT_S):
            while len(await registry.rollout_servers()) < count:  # noqa: ASYNC110 - in Redis
                await asyncio.sleep(0.2)

    def cpu_s(self) -> float:
        """Return the CPU seconds of servers, Redis and this process so far."""
        times = [one.cpu_times() for one in (*self._processes, self._redis)]
        return sum(one.user + one.system for one in times) + time.process_time()

    def pss_gb(self) -> float:
        """Return the memory of the servers."""
        return sum(pss_gb(one.pid) for one in self._processes)


def make_tasks(count: int, first: int) -> list[RolloutTask]:
    """Return samples that no server has seen."""
    task = Task(id="q", prompt="Who?", payload={"answers": ["x"]})
    return [
        RolloutTask(
            key=RolloutKey(run_id="bench", incarnation=0, group_id=number, sample_index=0),
            group_size=1,
            task=task,
        )
        for number in range(first, first + count)
    ]


async def work(broker: Broker, tasks: list[RolloutTask]) -> None:
    """Ask for samples, have them scored, and take the scores.

    Raises:
        RuntimeError: samples failed, or came twice.
    """
    keys, stop = broker.keys, asyncio.Event()
    reward = RewardWorker(
        broker, Scorer(RewardConfig(components={"exact_match": 1.0})), consumer_name="reward"
    )
    scoring = asyncio.create_task(reward.run(stop))
    seen: list[int] = []
    async with (
        asyncio.timeout(TIMEOUT_S),
        broker.consumer(keys.scored, ScoredTrajectory, group="bench", consumer="b") as consumer,
    ):
        await broker.publish_many(keys.tasks, tasks)
        while len(seen) < len(tasks):
            entries = await consumer.read(64, 1.0)
            good = [one.message.trajectory for one in entries if one.message.reward is not None]
            if len(good) < len(entries):
                raise RuntimeError("a sample failed")
            seen += [one.rollout.key.group_id for one in good]
            await consumer.finish_many(entries)
    stop.set()
    await scoring
    if len(set(seen)) < len(tasks):
        raise RuntimeError("a sample came twice")


async def cost(fleet: Fleet, broker: Broker, servers: int) -> float:
    """Return CPU milliseconds a trajectory with so many servers."""
    with fleet:
        settings = {"max_concurrent": IN_FLIGHT // servers}
        await fleet.start(
            Registry(broker), servers, shortest_s=TURN_S, longest_s=TURN_S, **settings
        )
        await work(broker, make_tasks(IN_FLIGHT, 0))  # warm-up
        before, started = fleet.cpu_s(), time.perf_counter()
        await work(broker, make_tasks(SAMPLES, IN_FLIGHT))
        spent, wall = fleet.cpu_s() - before, time.perf_counter() - started
    rate = SAMPLES / wall
    print(f"{servers:3} servers: {spent / SAMPLES * 1e3:.2f} ms CPU a trajectory, {rate:.0f}/s")
    sys.stdout.flush()
    return spent / SAMPLES * 1e3


async def hold(fleet: Fleet, broker: Broker, count: int) -> dict[str, Any]:
    """Hold so many trajectories in flight and return what they take."""
    with fleet:
        await fleet.start(
            Registry(broker),
            64,
            max_concurrent=-(-count // 64),
            shortest_s=HOLD_S,
            longest_s=2 * HOLD_S,
        )
        empty = fleet.pss_gb(), (await broker.memory()).used / 1e9
        working = asyncio.create_task(work(broker, make_tasks(count, 0)))
        peak, servers, redis = 0, 0.0, 0.0
        while not working.done():
            await asyncio.sleep(0.5)
            peak = max(peak, await broker.pending(broker.keys.tasks, "rollout"))
            servers = max(servers, fleet.pss_gb())
            redis = max(redis, (await broker.memory()).used / 1e9)
        await working
    grown = (servers - empty[0], redis - empty[1])
    print(
        f"{peak} in flight: servers {servers:.2f} GB, {grown[0]:.2f} of it by them; Redis "
        f"{redis:.3f} GB, {grown[1]:.3f} of it by them"
    )
    held = entry(f"scale/most of {count} in flight at once", peak, count, 1.0, "higher")
    each = {"server_kb": grown[0] * 1e6 / count, "redis_kb": grown[1] * 1e6 / count}
    return {**held, **{name: round(value, 2) for name, value in each.items()}}


async def measure(numbers: list[int], in_flight: int, rounds: int) -> list[dict[str, Any]]:
    """Measure everything against one Redis server."""
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    costs: dict[int, list[float]] = {number: [] for number in numbers}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        redis = [find_redis_server(), "--port", str(port), "--bind", "127.0.0.1", "--dir", text]
        quiet = ["--save", "", "--appendonly", "no", "--logfile", str(folder / "redis.log")]
        with process(*redis, *quiet) as server:
            for _ in range(rounds):
                for number in numbers:
                    async with await _fresh(url) as broker:
                        fleet = Fleet(folder, url, server.pid)
                        costs[number].append(await cost(fleet, broker, number))
            results = [
                entry(
                    f"scale/ms CPU a trajectory, {number} servers over {numbers[0]}",
                    statistics.median(costs[number]),
                    statistics.median(costs[numbers[0]]),
                    GOAL,
                    "lower",
                )
                for number in numbers[1:]
            ]
            if in_flight:
                async with await _fresh(url) as broker:
                    results.append(await hold(Fleet(folder, url, server.pid), broker, in_flight))
    return results


async def _fresh(url: str) -> Broker:
    broker = await Broker.connect(url, "bench")
    await broker.redis.flushall()
    await Registry(broker).set_incarnation(0)
    await Registry(broker).set_newest_version(NewestVersion(policy_version=0))
    return broker


def main() -> None:
    """Serve, as a child of this command, or measure and write the results."""
    parser = argparse.ArgumentParser(description="Measure what rollout servers cost together.")
    parser.add_argument("--servers", default="1,4,16,64", help="numbers of rollout servers")
    parser.add_argument("--in-flight", type=int, default=16_000, help="trajectories held at once")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # of servers that start and leave together
    if arguments.serve is not None:
        asyncio.run(serve_many(json.loads(arguments.serve.read_text(encoding="utf-8"))))
        return
    numbers = [int(number) for number in arguments.servers.split(",")]
    results = asyncio.run(measure(numbers, arguments.in_flight, arguments.rounds))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_entries(results)
    print(f"written to {OUT}")


if __name__ == "__main__":
    main()
