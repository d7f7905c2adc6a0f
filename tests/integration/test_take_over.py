"""One learner trains a run, and its numbers go on from what the services hold: on a real Redis."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent_r1.config.run import Config, ConfigError
from agent_r1.launch.local import prepare_redis
from agent_r1.learner.checkpoints.ledger import Ledger
from agent_r1.learner.checkpoints.ownership import TakenOverError
from agent_r1.learner.heartbeat import Heartbeat, refuse_a_second
from agent_r1.learner.train import Learner
from agent_r1.runtime.config import RedisConfig, RunConfig
from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from tests.support.learner_fakes import FakeEngine, FakeServices, eventually, training_spec

pytestmark = pytest.mark.redis

LEASE_S = 2.0  # of training_spec
WAIT_S = 30.0


def copy_of(folder: Path) -> Path:
    """Copy a run folder and its data, as for an experiment or from a backup."""
    copy = folder.with_name("copy")
    # Of a run that goes on: without files that are being written.
    passing = shutil.ignore_patterns("*.tmp", "*.tmp.*")
    shutil.copytree(folder, copy, ignore=passing)
    data = folder.with_name(folder.name + "-data")
    shutil.copytree(data, folder.with_name("copy-data"), ignore=passing)
    return copy


async def test_a_copy_is_refused_while_the_run_is_trained(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    engine = FakeEngine(train_s=0.1)
    async with await Broker.connect(redis_url, run_id, lease_s=LEASE_S) as broker:
        registry = Registry(broker)
        async with FakeServices(broker).running():
            spec = training_spec(folder, redis_url, run_id, steps=60)
            first = asyncio.create_task(Learner(spec, engine).run())
            await eventually(lambda: engine.steps >= 2, first)
            copy = training_spec(copy_of(folder), redis_url, run_id, resume=True, steps=60)
            before = await registry.incarnation(), Ledger(copy.folder.path).last_incarnation
            started = time.monotonic()
            with pytest.raises(ValueError, match="is trained by another learner") as caught:
                await asyncio.wait_for(Learner(copy, FakeEngine()).run(), WAIT_S)
            assert time.monotonic() - started < LEASE_S  # it beats four times in a lease
            assert f"process {os.getpid()} on {socket.gethostname()}, in {folder}," in str(
                caught.value
            )
            assert "--take-over" in str(caught.value)
            after = await registry.incarnation(), Ledger(copy.folder.path).last_incarnation
            assert before == after == (1, 1)
            steps = engine.steps
            await eventually(lambda: engine.steps > steps, first)  # the first one goes on
            assert not first.done()
            first.cancel()
            await asyncio.wait([first])
        assert await registry.heartbeat() is None  # whoever ends in order says so


async def test_a_take_over_that_was_asked_for_ends_the_other_and_goes_on(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    engine, second = FakeEngine(train_s=0.1), FakeEngine()
    async with (
        await Broker.connect(redis_url, run_id, lease_s=LEASE_S) as broker,
        FakeServices(broker).running() as services,
    ):
        spec = training_spec(folder, redis_url, run_id, steps=60)
        first = asyncio.create_task(Learner(spec, engine).run())
        await eventually(lambda: len(services.loads) >= 1, first)
        copied = copy_of(folder)
        await eventually(lambda: len(services.loads) >= 4, first)  # the copy gets old
        copy = training_spec(copied, redis_url, run_id, resume=True, steps=3, take_over=True)
        await asyncio.wait_for(Learner(copy, second).run(), WAIT_S)
        with pytest.raises(TakenOverError, match="learner start 2 has taken over"):
            await asyncio.wait_for(first, WAIT_S)
    assert services.loads == sorted(set(services.loads))  # no version twice
    assert Ledger(copied).last_policy_version == services.loads[-1]


async def test_a_learner_that_was_killed_is_replaced_within_a_lease(
    tmp_path: Path, redis_url: str, run_id: str
):
    async with await Broker.connect(redis_url, run_id) as broker:
        registry = Registry(broker)
        await Heartbeat(registry, tmp_path / "first", LEASE_S).beat()
        started = time.monotonic()
        # In the same folder at once: its lock says that the other has ended.
        await refuse_a_second(registry, run_id, tmp_path / "first")
        assert time.monotonic() - started < LEASE_S / 2
        await refuse_a_second(registry, run_id, tmp_path / "second")
        assert LEASE_S / 2 < time.monotonic() - started < LEASE_S + 1.0


async def test_the_heartbeat_of_another_start_is_not_withdrawn(
    tmp_path: Path, redis_url: str, run_id: str
):
    async with await Broker.connect(redis_url, run_id) as broker:
        registry = Registry(broker)
        first, second = (Heartbeat(registry, tmp_path / name, LEASE_S) for name in "ab")
        await second.beat(7)
        await first.withdraw()
        found = await registry.heartbeat()
        assert found is not None
        assert found.folder.endswith("/b")
        await second.withdraw()
        assert await registry.heartbeat() is None


@pytest.mark.parametrize("resume", [False, True])
async def test_a_folder_older_than_the_servers_goes_on_above_what_they_hold(
    resume: bool, tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker)
        if resume:
            folder.mkdir()
            Ledger(folder).next_incarnation()
            Ledger(folder).next_policy_version()
        await services.registry.set_incarnation(5)
        services.version = 7
        async with services.running():
            await eventually_announced(services.registry)
            spec = training_spec(folder, redis_url, run_id, resume=resume, steps=2)
            await asyncio.wait_for(Learner(spec, FakeEngine()).run(), WAIT_S)
    assert services.loads == [8, 9, 10]  # the start's own weights, and those of two steps
    ledger = Ledger(folder)
    # Incarnation 6; of the five before, the folder has seen none or one start of its own.
    assert (ledger.last_incarnation, ledger.starts) == (6, 2 if resume else 1)


async def test_servers_that_announce_themselves_late_get_a_version_above_theirs(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    folder.mkdir()
    Ledger(folder).next_incarnation()
    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker)
        services.version = 7
        spec = training_spec(folder, redis_url, run_id, resume=True, steps=1)
        learning = asyncio.create_task(Learner(spec, FakeEngine()).run())
        async with asyncio.timeout(WAIT_S):
            while await services.registry.newest_version() is None:  # noqa: ASYNC110 - Redis has it
                await asyncio.sleep(0.02)
        async with services.running():
            await asyncio.wait_for(learning, WAIT_S)
    assert services.loads == [8, 9]


async def eventually_announced(registry: Registry) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await registry.rollout_servers():  # noqa: ASYNC110 - Redis has it
            await asyncio.sleep(0.02)


async def test_the_launcher_leaves_the_keys_of_a_run_that_is_trained(
    tmp_path: Path, redis_url: str, run_id: str
):
    async def start_redis() -> str:
        return redis_url

    services: Any = SimpleNamespace(start_redis=start_redis, holds_run_id=False)
    run = RunConfig(id=run_id, dir=tmp_path / "copy")
    config = cast(Config, SimpleNamespace(run=run, redis=RedisConfig(url=redis_url)))
    async with await Broker.connect(redis_url, run_id) as broker:
        heartbeat = Heartbeat(Registry(broker), tmp_path / "run", LEASE_S)
        beating = asyncio.create_task(heartbeat.beat_forever())
        await Registry(broker).set_incarnation(3)
        try:
            with pytest.raises(ConfigError, match="is trained by another learner"):
                await asyncio.wait_for(
                    prepare_redis(services, config, lambda line: None, learner=True), WAIT_S
                )
        finally:
            beating.cancel()
            await asyncio.wait([beating])
        assert await Registry(broker).incarnation() == 3
    assert not services.holds_run_id  # nor are they deleted when its services stop
