"""The path of a trajectory through Redis, against what a user would write in an afternoon.

    python scripts/bench_path.py [--megatokens 4] [--rounds 7] [--tokens 512,4096,32768]

Each of three ways encodes trajectories of one length, writes them to a stream of a real Redis,
reads, decodes, acknowledges and deletes them:

- ours: `Broker.publish` by 32 tasks at once, `StreamConsumer.read` and `finish_many`;
- pickled: the same fields as a pickled dict of lists, one XADD, XREAD and XDEL per trajectory;
- packed: a msgpack map with the arrays as numpy bytes, all three commands for 32 at a time.

Rounds alternate between the three. A ratio is the median over rounds of the other way's CPU seconds
(this process and Redis together) over ours, so it compares what one core can carry. Neither of the
others validates, leases, or survives the death of a reader. Writes runs/bench/path.json.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import pickle
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import psutil
from bench_rollout import process
from bench_tools import entry, print_entries
from redis import Redis

from agent_r1.config.redis_server import find_redis_server
from agent_r1.launch.local_redis import free_port
from agent_r1_proto.messages import encode_entry
from agent_r1_proto.parts import TextPart
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutKey, RolloutTask, Task
from agent_r1_proto.trajectory import ToolCallRecord, Trajectory, Turn, VersionSpan

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "bench" / "path.json"
VOCABULARY = 151_936
TURNS = 4
SAMPLED_SHARE = 0.4
CHARACTERS_PER_TOKEN = 4
BATCH = 32
STREAM = "bench"
GOALS = {4096: 6.0, 32768: 8.0}
"""Of the ratio to pickled lists; the other ratios are only stated."""
BYTES_GOAL = 0.55
ARRAYS = ("token_ids", "action_mask", "rollout_logprobs")


def make_trajectory(num_tokens: int, number: int) -> Trajectory:
    """Return a search agent's trajectory: a prompt, then turns that are sampled to 40 %.

    Token ids follow Zipf's law (log-uniform ranks), as those of text do.
    """
    rng = np.random.default_rng(number)
    prompt, length = num_tokens // 8, num_tokens * 7 // 8 // TURNS
    sampled = int(length * SAMPLED_SHARE)
    mask = np.zeros(num_tokens, dtype=np.bool_)
    turns: list[Turn] = []
    for start in range(prompt, prompt + TURNS * length, length):
        end = start + sampled
        mask[start:end] = True
        result = TextPart(text="e" * (CHARACTERS_PER_TOKEN * (length - sampled)))
        call = ToolCallRecord(
            end_token_index=end - 1,
            tool="search",
            arguments={"query": "who was the first"},
            status="ok",
            version="1",
            instance="search-1",
            latency_ms=12.5,
            parts=[result],
        )
        text = "t" * (CHARACTERS_PER_TOKEN * sampled)
        turns.append(Turn(start=start, end=end, text=text, finish_reason="stop", calls=[call]))
    ids = np.exp(rng.uniform(np.log(256), np.log(VOCABULARY), num_tokens)).astype(np.int32)
    key = RolloutKey(run_id="bench", incarnation=1, group_id=number, sample_index=0)
    return Trajectory(
        rollout=RolloutTask(
            key=key,
            group_size=8,
            task=Task(id=f"q{number}", prompt="who?", payload={"answers": ["Ada"]}),
        ),
        token_ids=ids,
        action_mask=mask,
        rollout_logprobs=np.where(mask, -rng.exponential(size=num_tokens), 0).astype(np.float32),
        prompt_length=prompt,
        version_spans=[VersionSpan(policy_version=7, start=prompt, end=num_tokens)],
        turns=turns,
        status="COMPLETED",
        reason="answer",
        seed=number,
        temperature=1.0,
        server_id="rollout-1",
        started_at=1.7e9,
        latency_ms=812.5,
    )


class Ours:
    """The project's own way."""

    def __init__(self, url: str, trajectories: list[Trajectory]) -> None:
        self._url = url
        self._trajectories = trajectories
        fields = encode_entry(trajectories[0])
        self.num_bytes = sum(len(name) + len(value) for name, value in fields.items())

    async def __call__(self, count: int) -> None:
        """Take `count` trajectories along the path."""
        async with (
            await Broker.connect(self._url, "bench") as broker,
            broker.consumer(STREAM, Trajectory, group="bench", consumer="bench") as consumer,
        ):
            todo = iter(range(count))
            writers = asyncio.gather(*(self._write(broker, todo) for _ in range(BATCH)))
            received = 0
            while received < count:
                entries = await consumer.read(BATCH, 5.0)
                await consumer.finish_many(entries)
                received += len(entries)
            await writers

    async def _write(self, broker: Broker, todo: Iterator[int]) -> None:
        for number in todo:
            await broker.publish(STREAM, self._trajectories[number % len(self._trajectories)])


def as_dict(trajectory: Trajectory, convert: Callable[[Any], object]) -> dict[str, object]:
    """Return the fields of a trajectory, arrays converted."""
    arrays = {name: convert(getattr(trajectory, name)) for name in ARRAYS}
    return trajectory.model_dump(exclude=set(ARRAYS)) | arrays


class Pickled:
    """Pickled lists, one by one."""

    def __init__(self, url: str, trajectories: list[Trajectory]) -> None:
        self._redis: Any = Redis.from_url(url)
        self._messages = [as_dict(one, lambda array: array.tolist()) for one in trajectories]
        self.num_bytes = len(pickle.dumps(self._messages[0]))

    async def __call__(self, count: int) -> None:
        """Take `count` trajectories along the path."""
        for number in range(count):
            data = pickle.dumps(self._messages[number % len(self._messages)])
            self._redis.xadd(STREAM, {"data": data})
        last = b"0"
        for _ in range(count):
            ((_, rows),) = self._redis.xread({STREAM: last}, count=1)
            ((last, fields),) = rows
            pickle.loads(fields[b"data"])
            self._redis.xdel(STREAM, last)


class Packed:
    """Msgpack of numpy bytes, pipelined."""

    def __init__(self, url: str, trajectories: list[Trajectory]) -> None:
        self._redis: Any = Redis.from_url(url)
        self._messages = [as_dict(one, lambda array: array) for one in trajectories]
        self.num_bytes = len(self._encode(self._messages[0]))

    @staticmethod
    def _encode(message: dict[str, Any]) -> bytes:
        packer = msgpack.Packer()
        return bytes(packer.pack(message | {name: message[name].tobytes() for name in ARRAYS}))

    @staticmethod
    def _decode(data: bytes) -> dict[str, Any]:
        message = msgpack.unpackb(data)
        for name, dtype in zip(ARRAYS, (np.int32, np.bool_, np.float32), strict=True):
            message[name] = np.frombuffer(message[name], dtype)
        return message

    async def __call__(self, count: int) -> None:
        """Take `count` trajectories along the path."""
        last = b"0"
        for start in range(0, count, BATCH):
            pipe = self._redis.pipeline(transaction=False)
            for number in range(start, min(start + BATCH, count)):
                data = self._encode(self._messages[number % len(self._messages)])
                pipe.xadd(STREAM, {"data": data})
            pipe.execute()
            ((_, rows),) = self._redis.xread({STREAM: last}, count=BATCH)
            for _, fields in rows:
                self._decode(fields[b"data"])
            last = rows[-1][0]
            self._redis.xdel(STREAM, *(row[0] for row in rows))


async def seconds(way: Callable[[int], Awaitable[None]], count: int, redis_pid: int) -> list[float]:
    """Run one round.

    Returns:
        seconds per trajectory: of CPU here and in Redis, and of wall time.
    """
    server = psutil.Process(redis_pid)
    served, worked, started = server.cpu_times(), time.process_time(), time.perf_counter()
    await way(count)
    wall, here = time.perf_counter() - started, time.process_time() - worked
    after = server.cpu_times()
    there = after.user + after.system - served.user - served.system
    return [here / count, there / count, wall / count]


async def measure(
    url: str, redis_pid: int, num_tokens: int, count: int, rounds: int
) -> list[dict[str, Any]]:
    """Measure all three ways at one length, in alternating rounds."""
    trajectories = [make_trajectory(num_tokens, number) for number in range(8)]
    ways: dict[str, Any] = {
        way.__name__.lower(): way(url, trajectories) for way in (Ours, Pickled, Packed)
    }
    spent: dict[str, list[list[float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            figures = await seconds(way, BATCH if number == 0 else count, redis_pid)
            if number > 0:
                spent[name].append(figures)
    for name in ways:
        here, there, wall = (
            statistics.median(values) * 1e6 for values in zip(*spent[name], strict=True)
        )
        print(
            f"{num_tokens:6} tokens  {name:8} {ways[name].num_bytes:8} bytes  CPU here "
            f"{here:6.0f}, in Redis {there:4.0f}, wall {wall:6.0f} us a trajectory",
            flush=True,
        )
    results = [_compare(num_tokens, spent, other) for other in ("pickled", "packed")]
    for other, goal in (("pickled", BYTES_GOAL), ("packed", 1.0)):
        sizes = ways["ours"].num_bytes, ways[other].num_bytes
        results.append(entry(f"path/{num_tokens}/bytes_to_{other}", *sizes, goal, "lower"))
    return results


def _compare(num_tokens: int, spent: dict[str, list[list[float]]], other: str) -> dict[str, Any]:
    """Return the trajectories a CPU second, ours and the other's, and the median of their ratio."""
    ours, theirs = ([here + there for here, there, _ in spent[way]] for way in ("ours", other))
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    goal = GOALS.get(num_tokens, 0.0) if other == "pickled" else 0.0
    name = f"path/{num_tokens}/per_core_to_{other}"
    rate, their_rate = (1 / statistics.median(values) for values in (ours, theirs))
    found = entry(name, rate, their_rate, goal, "higher", ratio=statistics.median(ratios))
    return {**found, "spread": [round(ratios[0], 3), round(ratios[-1], 3)]}


def main() -> None:
    """Measure the chosen lengths and write the results."""
    parser = argparse.ArgumentParser(description="Measure the path of a trajectory through Redis.")
    parser.add_argument("--tokens", default="512,4096,32768", help="lengths, separated by commas")
    parser.add_argument("--megatokens", type=float, default=4.0, help="a round, in million tokens")
    parser.add_argument("--rounds", type=int, default=7, help="alternating rounds")
    arguments = parser.parse_args()
    gc.freeze()  # as services do when they have imported everything
    results: list[dict[str, Any]] = []
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        redis = [find_redis_server(), "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        quiet = ["--save", "", "--appendonly", "no", "--logfile", f"{folder}/redis.log"]
        with process(*redis, *quiet) as server:
            for num_tokens in map(int, arguments.tokens.split(",")):
                count = min(int(arguments.megatokens * 1e6 / num_tokens), 2000)
                url = f"redis://127.0.0.1:{port}/0"
                results += asyncio.run(
                    measure(url, server.pid, num_tokens, count, arguments.rounds)
                )
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_entries(results)
    print(f"written to {OUT}")


if __name__ == "__main__":
    main()
