"""A rollout server with a real engine that stops answering, or that loses its server.

The engine is vLLM's process, stopped by SIGSTOP: it lives, holds its memory, and does nothing.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from agent_r1_proto.trajectory import Trajectory
from agent_r1_proto.weights import NewestVersion
from tests.conftest import REPOSITORY
from tests.support.builders import rollout_task
from tests.support.rollout_bench import Bench

pytestmark = [
    pytest.mark.redis,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

START_S = 240.0
END_S = 120.0
LEASE_S = 600.0
"""Longer than any wait here: what reaches another server was given back."""
POLL_S = 0.05
STALL_S = 3.0
NUM_SAMPLES = 300


async def until(condition: Callable[[], object], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - processes change, not this one
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def served(
    folder: Path, model: Path, redis_url: str, run_id: str
) -> AsyncIterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """`agent-r1 serve rollout`, started by hand, with the processes below it."""
    config = {
        "run": {"id": run_id, "dir": str(folder / "run")},
        "model": {"path": str(model), "max_context": 512},
        "redis": {"url": redis_url, "lease_s": LEASE_S},
        "env": {"max_tokens_per_turn": 400, "max_turns": 1},
        "rollout": {
            "max_concurrent": 8,
            "kv_cache_gib": 0.25,
            "engine_stall_timeout_s": STALL_S,
        },
        "reward": {"components": {"exact_match": 1.0}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-P", "-m", "agent_r1.cli.main", "serve", "rollout"]
    command += [str(folder / "config.json"), "--announce-dir", str(folder / "announce")]
    announced = folder / "announce" / "rollout.json"
    with (folder / "log").open("wb") as log:
        process = await asyncio.to_thread(
            subprocess.Popen, command, cwd=REPOSITORY, stdout=log, stderr=log
        )
    below: list[psutil.Process] = []
    try:
        await until(lambda: announced.exists() or process.poll() is not None, START_S)
        assert process.poll() is None, (folder / "log").read_text()
        below += psutil.Process(process.pid).children(recursive=True)
        yield process, below
    finally:
        process.kill()
        process.wait(END_S)
        for one in below:
            if one.is_running():
                one.kill()


def engine_of(below: list[psutil.Process]) -> psutil.Process:
    """Return the engine: vLLM cannot rename its process in every environment."""
    (engine,) = [one for one in below if "resource_tracker" not in " ".join(one.cmdline())]
    return engine


def connections_of(process: psutil.Process) -> set[tuple[object, object]]:
    return {(one.laddr, one.raddr) for one in process.net_connections("inet")}


def all_gone(below: list[psutil.Process]) -> bool:
    return all(
        not one.is_running() or one.status() == psutil.STATUS_ZOMBIE
        for one in below
        if psutil.pid_exists(one.pid)
    )


@pytest.fixture
async def broker(redis_url: str, run_id: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url, run_id, lease_s=LEASE_S) as connected:
        registry = Registry(connected)
        await registry.set_newest_version(NewestVersion(policy_version=0))
        await registry.set_incarnation(1)
        yield connected


async def results(broker: Broker, found: dict[tuple[int, int], Trajectory], wanted: int) -> None:
    """Take results from the stream until `found` has so many."""
    async with (
        asyncio.timeout(END_S),
        broker.consumer(
            broker.keys.trajectories, Trajectory, group="reward", consumer="test"
        ) as consumer,
    ):
        while len(found) < wanted:
            for entry in await consumer.read(64, 1.0):
                key = entry.message.rollout.key
                assert (key.group_id, key.sample_index) not in found
                found[key.group_id, key.sample_index] = entry.message
                await consumer.finish(entry)


async def test_a_stopped_engine_ends_its_server_and_another_one_does_the_samples(
    broker: Broker, tmp_path: Path, redis_url: str, run_id: str, tiny_base_dir: Path
):
    found: dict[tuple[int, int], Trajectory] = {}
    samples = [
        rollout_task(run_id, group_id=group, sample_index=sample)
        for group in range(NUM_SAMPLES // 2)
        for sample in range(2)
    ]
    async with served(tmp_path, tiny_base_dir, redis_url, run_id) as (process, below):
        await broker.publish_many(broker.keys.tasks, samples)
        await results(broker, found, 1)
        engine_of(below).suspend()
        taken = await broker.redis.xpending(broker.keys.tasks, "rollout")
        assert taken["pending"] > 0  # the engine was in the middle of these
        status = await asyncio.to_thread(process.wait, END_S)
        assert status not in (0, 2)  # a supervisor starts it again
        await until(lambda: all_gone(below), END_S)
        assert await Registry(broker).rollout_servers() == []
        log = (tmp_path / "log").read_text()
        assert "engine is wedged" in log
        assert "rollout.engine_stall_timeout_s" in log
    other = await asyncio.to_thread(Bench.of, broker, redis_url, tmp_path)
    async with other.server(other.policy("<answer>Ada</answer>"), rollout={"server_id": "other"}):
        await results(broker, found, NUM_SAMPLES)
    assert {key: one.rollout.key.attempt for key, one in found.items()} == {
        (task.key.group_id, task.key.sample_index): 0 for task in samples
    }
    assert sum(one.server_id == "other" for one in found.values()) >= taken["pending"]


async def test_a_server_that_is_killed_leaves_no_process_behind(
    broker: Broker, tmp_path: Path, redis_url: str, run_id: str, tiny_base_dir: Path
):
    async with served(tmp_path, tiny_base_dir, redis_url, run_id) as (process, below):
        url = json.loads((tmp_path / "announce" / "rollout.json").read_text())["url"]
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}/healthz")).json()["status"] == "ok"
        engine = engine_of(below)
        assert connections_of(psutil.Process(process.pid)) & connections_of(engine) == set()
        engine.suspend()  # a stopped one must go as well
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait, END_S)
        await until(lambda: all_gone(below), END_S)
