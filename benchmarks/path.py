"""The path of a trajectory through Redis, against what a user would write in an afternoon.

    make bench CASE=path ARGS="--tokens 512 4096 32768 --megatokens 4 --rounds 7"

Each of three ways encodes trajectories of one length, writes them to a stream of a real Redis,
reads, decodes, acknowledges and deletes them:

- ours: `Broker.publish` by 32 tasks at once, `StreamConsumer.read` and `finish_many`;
- pickled: the same fields as a pickled dict of lists, one XADD, XREAD and XDEL per trajectory;
- packed: a msgpack map with the arrays as numpy bytes, all three commands for 32 at a time.

Figures are trajectories a second of CPU time, of this process and Redis together: what one core can
carry. Neither of the others validates, leases, or survives the death of a reader.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import psutil
from redis import Redis

from agent_r1_proto.messages import encode_entry
from agent_r1_proto.parts import TextPart
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutKey, RolloutTask, Task
from agent_r1_proto.trajectory import ToolCallRecord, Trajectory, Turn, VersionSpan
from benchmarks.harness import Row, alternate, compare, read_options, write_report
from benchmarks.processes import cpu_s, redis_server

VOCABULARY = 151_936
TURNS = 4
SAMPLED_SHARE = 0.4
CHARACTERS_PER_TOKEN = 4
BATCH = 32
MOST = 2000
"""Trajectories of a round."""
STREAM = "bench"
GOALS = {4096: "≥ 6", 32768: "≥ 8"}
"""Of the ratio to pickled lists, by tokens; the others are only stated."""
ARRAYS = {"token_ids": np.int32, "action_mask": np.bool_, "rollout_logprobs": np.float32}


def make_trajectory(num_tokens: int, number: int) -> Trajectory:
    """Return a search agent's trajectory: a prompt, then turns that are sampled to 40 %.

    Token ids follow Zipf's law (log-uniform ranks), as those of text do.
    """
    rng = np.random.default_rng(number)
    prompt, length = num_tokens // 8, num_tokens * 7 // 8 // TURNS
    mask = np.zeros(num_tokens, dtype=np.bool_)
    turns: list[Turn] = []
    for start in range(prompt, prompt + TURNS * length, length):
        turns.append(_make_turn(start, int(length * SAMPLED_SHARE), length))
        mask[start : turns[-1].end] = True
    key = RolloutKey(run_id="bench", incarnation=1, group_id=number, sample_index=0)
    task = Task(id=f"q{number}", prompt="who?", payload={"answers": ["Ada"]})
    return Trajectory(
        rollout=RolloutTask(key=key, group_size=8, task=task),
        token_ids=np.exp(rng.uniform(np.log(256), np.log(VOCABULARY), num_tokens)).astype(np.int32),
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


def _make_turn(start: int, sampled: int, length: int) -> Turn:
    end = start + sampled
    call = ToolCallRecord(
        end_token_index=end - 1,
        tool="search",
        arguments={"query": "who was the first"},
        status="ok",
        version="1",
        instance="search-1",
        latency_ms=12.5,
        parts=[TextPart(text="e" * (CHARACTERS_PER_TOKEN * (length - sampled)))],
    )
    text = "t" * (CHARACTERS_PER_TOKEN * sampled)
    return Turn(start=start, end=end, text=text, finish_reason="stop", calls=[call])


def send_ours(url: str, trajectories: list[Trajectory], count: int) -> None:
    """Take trajectories along the project's own path."""

    async def write(broker: Broker, todo: Iterator[int]) -> None:
        for number in todo:
            await broker.publish(STREAM, trajectories[number % len(trajectories)])

    async def run() -> None:
        async with (
            await Broker.connect(url, "bench") as broker,
            broker.consumer(STREAM, Trajectory, group="bench", consumer="bench") as consumer,
        ):
            todo = iter(range(count))
            writers = asyncio.gather(*(write(broker, todo) for _ in range(BATCH)))
            received = 0
            while received < count:
                entries = await consumer.read(BATCH, 5.0)
                await consumer.finish_many(entries)
                received += len(entries)
            await writers

    asyncio.run(run())


def as_dict(trajectory: Trajectory, convert: Callable[[Any], object]) -> dict[str, Any]:
    """Return the fields of a trajectory, arrays converted."""
    arrays = {name: convert(getattr(trajectory, name)) for name in ARRAYS}
    return trajectory.model_dump(exclude=set(ARRAYS)) | arrays


def send_pickled(url: str, messages: list[dict[str, Any]], count: int) -> None:
    """Take pickled lists along, one by one."""
    redis: Any = Redis.from_url(url)
    last = b"0"
    for number in range(count):
        redis.xadd(STREAM, {"data": pickle.dumps(messages[number % len(messages)])})
    for _ in range(count):
        ((_, rows),) = redis.xread({STREAM: last}, count=1)
        ((last, fields),) = rows
        pickle.loads(fields[b"data"])
        redis.xdel(STREAM, last)


def pack(message: dict[str, Any]) -> bytes:
    """Return msgpack of numpy bytes."""
    arrays = {name: message[name].tobytes() for name in ARRAYS}
    return bytes(msgpack.Packer().pack(message | arrays))


def unpack(data: bytes) -> dict[str, Any]:
    """Return what `pack` was given."""
    message = msgpack.unpackb(data)
    return message | {name: np.frombuffer(message[name], kind) for name, kind in ARRAYS.items()}


def send_packed(url: str, messages: list[dict[str, Any]], count: int) -> None:
    """Take msgpack along, pipelined."""
    redis: Any = Redis.from_url(url)
    last = b"0"
    for start in range(0, count, BATCH):
        pipe = redis.pipeline(transaction=False)
        for number in range(start, min(start + BATCH, count)):
            pipe.xadd(STREAM, {"data": pack(messages[number % len(messages)])})
        pipe.execute()
        ((_, rows),) = redis.xread({STREAM: last}, count=BATCH)
        for _, fields in rows:
            unpack(fields[b"data"])
        last = rows[-1][0]
        redis.xdel(STREAM, *(row[0] for row in rows))


def rate(send: Callable[[int], None], server: psutil.Process, count: int) -> float:
    """Return trajectories a second of CPU time, of this process and of Redis."""
    before = cpu_s(server) + time.process_time()
    send(count)
    return count / (cpu_s(server) + time.process_time() - before)


def measure(url: str, server: psutil.Process, tokens: int, count: int, rounds: int) -> list[Row]:
    """Measure all three ways at one length."""
    trajectories = [make_trajectory(tokens, number) for number in range(8)]
    pickled = [as_dict(one, lambda array: array.tolist()) for one in trajectories]
    packed = [as_dict(one, lambda array: array) for one in trajectories]
    fields = encode_entry(trajectories[0])
    sizes = {
        "ours": sum(len(name) + len(value) for name, value in fields.items()),
        "pickled": len(pickle.dumps(pickled[0])),
        "packed": len(pack(packed[0])),
    }
    sends = {
        "ours": partial(send_ours, url, trajectories),
        "pickled": partial(send_pickled, url, pickled),
        "packed": partial(send_packed, url, packed),
    }
    for send in sends.values():
        send(BATCH)  # warms up
    found = alternate(
        {name: partial(rate, send, server, count) for name, send in sends.items()}, rounds
    )
    rows: list[Row] = []
    for other in ("pickled", "packed"):
        goal = GOALS.get(tokens) if other == "pickled" else None
        what = f"{tokens:,} tokens, {other}: a CPU second"
        rows.append(compare(what, found["ours"], found[other], goal))
        what = f"{tokens:,} tokens, {other}: bytes"
        goal = "≤ 0.55" if other == "pickled" else None
        rows.append(compare(what, [sizes["ours"]], [sizes[other]], goal))
    return rows


def main() -> None:
    """Measure the chosen lengths."""
    options = read_options(__doc__, tokens=(512, 4096, 32768), megatokens=4.0, rounds=7)
    gc.freeze()  # as services do when they have imported everything
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as (url, server):
        for tokens in options.tokens:
            count = min(int(options.megatokens * 1e6 / tokens), MOST)
            rows += measure(url, server, tokens, count, options.rounds)
    write_report("path", rows)


if __name__ == "__main__":
    main()
