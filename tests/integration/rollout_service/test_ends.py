"""The rollout server: however it ends, no sample is lost."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from agent_r1.rollout.envs import ToolEnv
from agent_r1.text.tokens import EngineDeadError
from agent_r1_proto.failures import FailureBoard
from tests.conftest import REPOSITORY
from tests.support.rollout_bench import (
    ANSWER,
    WAIT_S,
    Bench,
    keys,
    task,
    until,
    until_empty,
    until_true,
)

pytestmark = pytest.mark.redis


async def test_stopped_server_gives_its_samples_back_at_once(bench: Bench):
    policy = bench.gated_policy(asyncio.Event())
    async with bench.server(policy):
        await bench.submit(task(bench, sample_index=0), task(bench, sample_index=1))
        await until(lambda: policy.num_in_flight == 2)
    # The lease is 60 s: only a sample that was given back reaches the next server in time.
    async with bench.server(bench.policy(ANSWER)):
        done = await bench.trajectories(2)
    assert keys(done) == [(1, 0, 0, 0), (1, 0, 1, 0)]


async def test_a_drained_server_finishes_its_samples_and_leaves(bench: Bench):
    gate = asyncio.Event()
    policy = bench.gated_policy(gate)
    async with bench.server(policy, rollout={"server_id": "one", "announce_expiry_s": 1.0}) as one:
        await bench.submit(task(bench, sample_index=0), task(bench, sample_index=1))
        await until(lambda: policy.num_in_flight == 2)
        await bench.registry.drain_rollout_server("one", timeout_s=WAIT_S)
        await until_true(bench.left)
        await bench.submit(task(bench, sample_index=2))
        async with bench.server(bench.policy(ANSWER), rollout={"server_id": "two"}):
            assert [done.server_id for done in await bench.trajectories(1)] == ["two"]
            gate.set()
            done = await bench.trajectories(2)
            assert [one.server_id for one in done] == ["one", "one"]
            await asyncio.wait_for(one, WAIT_S)  # ends by itself, in order
    assert keys(done) == [(1, 0, 0, 0), (1, 0, 1, 0)]


async def test_a_drained_server_gives_back_what_takes_too_long(bench: Bench):
    policy = bench.gated_policy(asyncio.Event())
    async with bench.server(policy, rollout={"server_id": "one", "announce_expiry_s": 1.0}) as one:
        await bench.submit(task(bench))
        await until(lambda: policy.num_in_flight == 1)
        await bench.registry.drain_rollout_server("one", timeout_s=0.2)
        await asyncio.wait_for(one, WAIT_S)
        # The launcher does not start again what has taken its announcement back.
        assert not (bench.folder / "rollout.json").exists()
    # Its successor of the same name is not drained.
    async with bench.server(bench.policy(ANSWER), rollout={"server_id": "one"}):
        assert keys(await bench.trajectories(1)) == [(1, 0, 0, 0)]


async def test_dead_engine_ends_the_server_and_gives_the_samples_back(bench: Bench):
    gate = asyncio.Event()
    policy = bench.gated_policy(gate)
    async with bench.server(policy) as serving:
        await bench.submit(task(bench))
        await until(lambda: policy.num_in_flight == 1)
        policy.die("the engine was killed")
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{bench.url}/healthz")).status_code == 503
        gate.set()
        with pytest.raises(EngineDeadError, match="was killed"):
            await asyncio.wait_for(serving, WAIT_S)
    async with bench.server(bench.policy(ANSWER)):
        (done,) = await bench.trajectories(1)
    assert done.rollout.key.attempt == 0


async def test_wedged_engine_ends_the_server_and_gives_the_samples_back(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    policy = bench.gated_policy(asyncio.Event())
    async with bench.server(policy, rollout={"engine_stall_timeout_s": 0.3}) as serving:
        await bench.submit(task(bench, sample_index=0), task(bench, sample_index=1))
        await until(lambda: policy.num_in_flight == 2)
        policy.answering.clear()
        with pytest.raises(EngineDeadError, match=r"2 requests gave no sign of work for 0\.3 s"):
            await asyncio.wait_for(serving, WAIT_S)
    assert await bench.registry.rollout_servers() == []
    assert "engine is wedged in_flight=2" in caplog.text
    # The lease is 60 s: only samples that were given back reach the next server in time.
    async with bench.server(bench.policy(ANSWER)):
        done = await bench.trajectories(2)
    assert keys(done) == [(1, 0, 0, 0), (1, 0, 1, 0)]


async def test_engine_that_is_wedged_while_idle_ends_the_server(bench: Bench):
    policy = bench.policy(ANSWER)
    policy.answering.clear()
    async with bench.server(policy, rollout={"engine_stall_timeout_s": 0.3}) as serving:
        with pytest.raises(EngineDeadError, match="without requests gave no sign of work"):
            await asyncio.wait_for(serving, WAIT_S)


async def test_engine_that_dies_while_idle_ends_the_server(bench: Bench):
    policy = bench.policy(ANSWER)
    async with bench.server(policy, rollout={"engine_stall_timeout_s": 0.3}) as serving:
        policy.die("the engine was killed")
        with pytest.raises(EngineDeadError, match="was killed"):
            await asyncio.wait_for(serving, WAIT_S)


class NeverCloses(ToolEnv):
    """An environment whose clean-up hangs, for one of the tasks."""

    async def close(self) -> None:
        if self.task.id == "q7":
            await asyncio.Event().wait()


async def test_one_sample_whose_clean_up_hangs_does_not_keep_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.attempts.worker.STOP_TIMEOUT_S", 0.5)
    policy = bench.gated_policy(asyncio.Event())
    env = {"type": f"{__name__}:NeverCloses"}
    async with bench.server(policy, env=env):
        await bench.submit(task(bench, group_id=7), task(bench, sample_index=1))
        await until(lambda: policy.num_in_flight == 2)
    # The lease is 60 s: only a sample that was given back reaches another server in time.
    async with bench.server(bench.policy(ANSWER), rollout={"server_id": "another"}):
        (done,) = await bench.trajectories(1)
    assert keys([done]) == [(1, 0, 1, 0)]


async def test_sample_that_cannot_be_published_is_dead_lettered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    async def broken(*_: object, **__: object) -> None:
        raise TypeError("a bug of ours")

    monkeypatch.setattr("agent_r1.rollout.agent_loop.AgentLoop.run", broken)
    async with bench.server(bench.policy(ANSWER)):
        await bench.submit(task(bench))
        await until_empty(bench)
        (letter,) = await bench.broker.dead_letters()
        (failed,) = await bench.trajectories(1)
        ((shown, count),) = await FailureBoard(bench.broker).read()
    assert "a bug of ours" in letter.reason
    # Whoever waits is told at once, and the board has the place.
    assert (failed.status, failed.reason) == ("FAILED", "rollout_error: TypeError: a bug of ours")
    assert (shown.where, count) == ("rollout", 3)
    assert 'raise TypeError("a bug of ours")' in shown.reason


@asynccontextmanager
async def server_process(
    bench: Bench, lease_s: float, num_samples: int
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A server process that has taken samples and is in the middle of them."""
    folder = bench.folder / "process"
    command = [sys.executable, "-m", "tests.support.rollout_process", bench.redis_url]
    command += [bench.run_id, str(folder), str(lease_s)]
    process = await asyncio.to_thread(subprocess.Popen, command, cwd=REPOSITORY)

    async def has_taken_them() -> bool:
        return await bench.num_pending() == num_samples

    try:
        await until(lambda: (folder / "rollout.json").exists() or process.poll() is not None)
        await bench.submit(*(task(bench, sample_index=i) for i in range(num_samples)))
        await until_true(has_taken_them)
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)


async def test_killed_server_loses_nothing(bench: Bench):
    async with server_process(bench, 1.0, 3) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
    survivor = {"server_id": "survivor"}
    async with bench.server(bench.policy(ANSWER), rollout=survivor, lease_s=1.0):
        done = await bench.trajectories(3)
        await until_empty(bench)
    assert keys(done) == [(1, 0, 0, 0), (1, 0, 1, 0), (1, 0, 2, 0)]
    assert {trajectory.server_id for trajectory in done} == {"survivor"}


async def test_sigterm_stops_a_server_process_in_order(bench: Bench):
    async with server_process(bench, 60.0, 1) as process:
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, WAIT_S) == 0
    assert await bench.registry.rollout_servers() == []
    async with bench.server(bench.policy(ANSWER)):
        (done,) = await bench.trajectories(1)
    assert keys([done]) == [(1, 0, 0, 0)]
