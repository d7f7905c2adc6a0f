"""What every test of the rollout server asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_r1_proto.streams import Broker
from agent_r1_proto.weights import NewestVersion
from tests.support.rollout_bench import Bench


@pytest.fixture
async def broker(redis_url: str, run_id: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url, run_id, lease_s=60.0) as connected:
        yield connected


@pytest.fixture
async def bench(broker: Broker, redis_url: str, tmp_path: Path) -> Bench:
    bench = await asyncio.to_thread(Bench.of, broker, redis_url, tmp_path)
    await bench.registry.set_newest_version(NewestVersion(policy_version=0))
    await bench.registry.set_incarnation(1)
    return bench
