"""Gateways, rollout servers and the agents' service are killed in mid-stream, again and again.

AGENT_KILLS says how often; `make test-agents` asks for 50.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_r1_proto.connection import REWARD_GROUP
from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from agent_r1_proto.trajectory import Trajectory
from agent_r1_proto.weights import NewestVersion
from tests.conftest import RedisServer
from tests.support.builders import rollout_task

pytestmark = [pytest.mark.redis, pytest.mark.slow]
REPOSITORY = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("AGENT_KILLS", "2"))
ATTEMPTS = 8
TOKEN_S = 0.02
LEASE_S = 3.0


@dataclass
class Process:
    """A service that is started again whenever it was killed."""

    command: Sequence[str]
    announce_dir: Path
    log: Path
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        for old in self.announce_dir.glob("*.json"):
            old.unlink()
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command, stdout=log, stderr=log, cwd=REPOSITORY
            )
        while not list(self.announce_dir.glob("*.json")):
            assert self.process.returncode is None, self.log.read_text()[-3000:]
            await asyncio.sleep(0.05)

    async def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(how)
        await self.process.wait()


def _config(folder: Path, url: str, run_id: str, model: Path) -> Path:
    file = folder / "run.toml"
    file.write_text(f"""
[run]
id = "{run_id}"
[model]
path = "{model}"
max_context = 768
[redis]
url = "{url}"
lease_s = {LEASE_S}
[env]
max_tokens_per_turn = 64
[agent]
command = ["{sys.executable}", "{REPOSITORY / "tests" / "support" / "patient_agent.py"}"]
artefacts = ["heard.json"]
timeout_s = 240
""")
    return file


@pytest.mark.timeout(300 + 12 * KILLS)
async def test_nothing_is_lost_doubled_or_trained_unheard(
    redis_server: RedisServer, run_id: str, tiny_base_dir: Path, tmp_path: Path
):
    url = redis_server.url
    config = _config(tmp_path, url, run_id, tiny_base_dir)
    serve = [sys.executable, "-m", "agent_r1.cli.main", "serve"]
    slow = [sys.executable, "-m", "tests.support.slow_rollout", url, run_id]

    def process(name: str) -> Process:
        folder = tmp_path / name
        kind = name.partition("-")[0]
        command = [*serve, kind, str(config), "--announce-dir", str(folder)]
        if kind == "rollout":
            command = [*slow, str(folder), str(tiny_base_dir), str(TOKEN_S)]
        return Process(command, folder, folder.with_suffix(".log"))

    names = ("gateway-0", "gateway-1", "rollout-0", "rollout-1", "agents")
    everyone = [process(name) for name in names]
    async with await Broker.connect(url, run_id, lease_s=LEASE_S) as broker:
        await Registry(broker).set_newest_version(NewestVersion(policy_version=0))
        try:
            await asyncio.gather(*(one.start() for one in everyone))
            wanted = max(ATTEMPTS, KILLS * 2)
            tasks = [rollout_task(run_id, group_id=i) for i in range(wanted)]
            await broker.publish_many(broker.keys.tasks, tasks)
            killing = asyncio.create_task(_kill_some(everyone, KILLS))
            found = await _collect(broker, wanted)
            await killing
            assert await broker.depth(broker.keys.tasks) == 0
            assert not await broker.dead_letters()
        finally:
            await asyncio.gather(*(one.end() for one in everyone if one.process))
    slots = Counter(one.rollout.key.group_id for one in found)
    assert slots == dict.fromkeys(range(wanted), 1)
    trained = 0
    for one in found:
        assert one.status != "FAILED", one.reason
        told = _heard(one)
        turns = [turn.text for turn in one.trained_turns()]
        assert turns == told[: len(turns)]
        assert len(turns) >= len(told) - 1  # the last one may have been heard and not noted
        trained += len(turns)
        sampled = one.action_mask.sum()
        excluded = sampled - one.trained_mask().sum()
        assert sampled == sum(turn.end - turn.start for turn in one.turns)
        assert excluded >= 0
    assert trained > wanted  # most were heard to the end


async def _kill_some(processes: Sequence[Process], times: int) -> None:
    """Kill one after the other, and start it again; a gateway may be asked to stop instead."""
    chance = random.Random(1)
    for _ in range(times):
        await asyncio.sleep(chance.uniform(0.3, 1.5))  # any moment is as good
        victim = chance.choice(processes)
        how = [signal.SIGKILL, signal.SIGTERM] if "gateway" in victim.log.name else [signal.SIGKILL]
        await victim.end(chance.choice(how))
        await victim.start()


async def _collect(broker: Broker, count: int) -> list[Trajectory]:
    """Return the trajectories of that many samples, and what else comes in a lease's time."""
    found: list[Trajectory] = []
    async with broker.consumer(
        broker.keys.trajectories, Trajectory, group=REWARD_GROUP, consumer="test"
    ) as consumer:
        while len({one.rollout.key.group_id for one in found}) < count:
            for entry in await consumer.read(16, 1.0):
                found.append(entry.message)
                await consumer.finish(entry)
        for entry in await consumer.read(16, LEASE_S):
            found.append(entry.message)
            await consumer.finish(entry)
    return found


def _heard(trajectory: Trajectory) -> list[str]:
    data = next(turn.data for turn in reversed(trajectory.turns) if turn.data is not None)
    assert isinstance(data, dict)
    artefacts = data["artefacts"]
    assert isinstance(artefacts, dict)
    return list(json.loads(str(artefacts["heard.json"])))
