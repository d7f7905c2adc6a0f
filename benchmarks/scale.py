"""Cost per trajectory with 1 to 64 rollout servers, and many trajectories in flight.

    make bench CASE=scale ARGS="--servers 1 4 16 64 --in-flight 16000 --rounds 3"

Rollout servers whose policy is a script (one turn of 60 tokens, half a second each) work through a
real Redis for a real reward worker; this process asks for samples and takes the scores, as a
learner does. Up to 16 servers share a process. Cost is CPU time of all processes and Redis
together, between the first sample and the last score. Whatever the number of servers, 512
trajectories are in flight, so what grows with it is the work that servers make by being there.

Then 64 servers hold `--in-flight` trajectories at once: the memory of Redis and of the servers, and
what it comes to for each trajectory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.reward.worker import RewardWorker
from agent_r1.rollout.config import EnvConfig, RolloutConfig
from agent_r1.rollout.main import RolloutSettings, build_chat_format, serve_policy
from agent_r1.rollout.policy import EngineWork
from agent_r1.runtime.config import ModelConfig, RedisConfig, RunConfig
from agent_r1.text.chat_format import ChatFormat
from agent_r1.text.tokens import Generation
from agent_r1_proto.registry import Registry
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutKey, RolloutTask, Task
from agent_r1_proto.trajectory import VersionSpan
from agent_r1_proto.weights import NewestVersion
from benchmarks.harness import Row, alternate, compare, read_options, write_report
from benchmarks.models import BASE
from benchmarks.processes import cpu_s, process, pss_gb, redis_server

END_ID = 2
TURN_TOKENS = 60
IN_FLIGHT = 512
SAMPLES = 4096
SERVERS_A_PROCESS = 16
HOLDERS = 64
TURN_S = 0.5
HOLD_S = 20.0
GOAL = "≤ 1.2"
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


async def serve_many(
    servers: int, redis_url: str, folder: str, max_concurrent: int, between_s: tuple[float, float]
) -> None:
    """Run some rollout servers in this process until it is told to end."""
    env = EnvConfig(max_turns=1)
    chat = build_chat_format(env, str(BASE), (END_ID,), has_tools=False)
    text = chat.encode_text("<think> one plan.</think><answer> x</answer>")
    turn = (text * TURN_TOKENS)[: TURN_TOKENS - len(text) - 1] + list(text) + [END_ID]
    rollout = RolloutSettings(
        run=RunConfig(id="bench"),
        model=ModelConfig(path=str(BASE), max_context=1024),
        redis=RedisConfig(url=redis_url),
        env=env,
        rollout=RolloutConfig(max_concurrent=max_concurrent),
        tools={},
        weights_dir=Path(folder),
    )
    await serve_together(
        [(ScriptedPolicy(turn, *between_s), rollout) for _ in range(servers)], chat
    )


async def serve_together(servers: Sequence[tuple[Any, RolloutSettings]], chat: ChatFormat) -> None:
    """Run a server with each policy until this process is told to end."""
    running = asyncio.gather(*(serve_policy(policy, chat, rollout) for policy, rollout in servers))
    await asyncio.sleep(0)  # each has set a handler of its own, and one would stop
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


@asynccontextmanager
async def fleet(
    url: str, servers: int, max_concurrent: int, between_s: tuple[float, float]
) -> AsyncIterator[tuple[Broker, list[psutil.Process]]]:
    """Yield an empty Redis, and the processes of so many servers that are up."""
    async with await Broker.connect(url, "bench") as broker:
        await broker.redis.flushall()
        registry = Registry(broker)
        await registry.set_incarnation(0)
        await registry.set_newest_version(NewestVersion(policy_version=0))
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            processes: list[psutil.Process] = []
            for first in range(0, servers, SERVERS_A_PROCESS):
                here = min(SERVERS_A_PROCESS, servers - first)
                settings = json.dumps([here, url, folder, max_concurrent, between_s])
                command = [sys.executable, "-m", "benchmarks.scale", "--serve", settings]
                processes.append(stack.enter_context(process(*command)))
            async with asyncio.timeout(TIMEOUT_S):
                while len(await registry.rollout_servers()) < servers:  # noqa: ASYNC110 - in Redis
                    await asyncio.sleep(0.2)
            yield broker, processes


def make_tasks(count: int, first: int) -> list[RolloutTask]:
    """Return samples that no server has seen."""
    task = Task(id="q", prompt="Who?", payload={"answers": ["x"]})
    keys = (
        RolloutKey(run_id="bench", incarnation=0, group_id=number, sample_index=0)
        for number in range(first, first + count)
    )
    return [RolloutTask(key=key, group_size=1, task=task) for key in keys]


async def work(broker: Broker, tasks: list[RolloutTask]) -> None:
    """Ask for samples, have them scored, and take the scores.

    Raises:
        RuntimeError: samples failed, or came twice.
    """
    keys, stop = broker.keys, asyncio.Event()
    scorer = Scorer(RewardConfig(components={"exact_match": 1.0}))
    reward = RewardWorker(broker, scorer, consumer_name="reward")
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


async def cost(url: str, redis: psutil.Process, servers: int) -> float:
    """Return CPU milliseconds a trajectory with so many servers."""
    between_s = (TURN_S, TURN_S)
    async with fleet(url, servers, IN_FLIGHT // servers, between_s) as (broker, processes):
        await work(broker, make_tasks(IN_FLIGHT, 0))  # warm-up
        before = cpu_s(*processes, redis) + time.process_time()
        await work(broker, make_tasks(SAMPLES, IN_FLIGHT))
        spent = cpu_s(*processes, redis) + time.process_time() - before
    return spent / SAMPLES * 1e3


async def hold(url: str, count: int) -> Row:
    """Hold so many trajectories in flight and return what they take."""
    between_s = (HOLD_S, 2 * HOLD_S)
    async with fleet(url, HOLDERS, -(-count // HOLDERS), between_s) as (broker, processes):

        async def memory_gb() -> tuple[float, float]:
            servers = sum(pss_gb(one.pid) for one in processes)
            return servers, (await broker.memory()).used / 1e9

        empty, most, largest = await memory_gb(), 0, (0.0, 0.0)
        working = asyncio.create_task(work(broker, make_tasks(count, 0)))
        while not working.done():
            await asyncio.sleep(0.5)
            most = max(most, await broker.pending(broker.keys.tasks, "rollout"))
            largest = tuple(map(max, largest, await memory_gb()))
        await working
    each = [(full - before) * 1e6 / count for full, before in zip(largest, empty, strict=True)]
    names = ("servers GB", "Redis GB", "servers kB a trajectory", "Redis kB a trajectory")
    return {"in flight": most, **dict(zip(names, (*largest, *each), strict=True))}


def main() -> None:
    """Serve, as a child of this command, or measure."""
    servers = (1, 4, 16, 64)
    options = read_options(__doc__, servers=servers, in_flight=16_000, rounds=3, serve="")
    logging.disable(logging.WARNING)  # of servers that start and leave together
    if options.serve:
        asyncio.run(serve_many(*json.loads(options.serve)))
        return
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as (url, redis):
        sides = {
            f"{number} servers": partial(lambda n: asyncio.run(cost(url, redis, n)), number)
            for number in options.servers
        }
        found = alternate(sides, options.rounds)
        held = asyncio.run(hold(url, options.in_flight)) if options.in_flight else {}
    first, *others = found
    rows = [
        compare(f"{name}, ms CPU a trajectory, over {first}", found[name], found[first], GOAL)
        for name in others
    ]
    write_report("scale", rows, held=held)
    print(json.dumps(held, indent=1))


if __name__ == "__main__":
    main()
