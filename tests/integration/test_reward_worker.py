"""The reward worker on a real Redis: scored once, whatever dies in between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.reward.worker import RewardWorker
from agent_r1_proto.failures import FailureBoard
from agent_r1_proto.messages import encode_entry
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.stream_consumer import StreamConsumer
from agent_r1_proto.streams import Broker
from tests.support.builders import rollout_task, trajectory
from tests.support.forked import Forked

pytestmark = pytest.mark.redis

LEASE_S = 0.6
WAIT_S = 30.0
POLL_S = 0.02
SERVE = """
import json, logging, sys
from pathlib import Path
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.main import serve
from agent_r1.text.reading import TurnReader
from agent_r1.runtime.config import RedisConfig, RunConfig
url, run_id, table, folder = sys.argv[1:]
logging.basicConfig(level="INFO")
serve(run=RunConfig(id=run_id), reader=TurnReader(), redis=RedisConfig(url=url, lease_s=0.6),
      reward=RewardConfig.model_validate(json.loads(table)), announce_dir=Path(folder))
"""
PLUGIN = """
import os, time
from pathlib import Path

def held(request):
    # The first process that scores says so and hangs; the next one answers.
    folder = Path(os.environ["HOLD_DIR"])
    try:
        (folder / "entered").touch(exist_ok=False)
    except FileExistsError:
        return 1.0
    while True:
        time.sleep(1)

def broken(request):
    raise KeyError("tests")

def deadly(request):
    # As a lack of memory ends it: no error, no clean-up.
    if request.turns[-1].answer == "boom":
        os.kill(os.getpid(), 9)
    return 1.0

def not_a_number(request):
    return float("nan")
"""


@pytest.fixture
async def broker(redis_url: str, run_id: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url, run_id, lease_s=LEASE_S) as connected:
        yield connected


@contextlib.asynccontextmanager
async def working(broker: Broker, table: RewardConfig | None = None) -> AsyncIterator[RewardWorker]:
    worker = RewardWorker(broker, Scorer(table or RewardConfig()), consumer_name="w")
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    try:
        yield worker
    finally:
        stop.set()
        await asyncio.wait_for(task, WAIT_S)


def scored_consumer(broker: Broker, stream: str) -> StreamConsumer[ScoredTrajectory]:
    return broker.consumer(stream, ScoredTrajectory, group="learner", consumer="test")


async def take(
    broker: Broker, count: int, stream: str | None = None
) -> dict[str, ScoredTrajectory]:
    """Return exactly `count` scored trajectories by rollout id, and check that no other comes."""
    found: dict[str, ScoredTrajectory] = {}
    async with scored_consumer(broker, stream or broker.keys.scored) as consumer:
        deadline = time.monotonic() + WAIT_S
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} came"
            for entry in await consumer.read(count, 0.5):
                assert entry.message.stream_key() not in found, "scored twice"
                found[entry.message.stream_key()] = entry.message
                await consumer.finish(entry)
        assert await consumer.read(1, 0.0) == []
    return found


async def until_empty(broker: Broker, stream: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while await broker.depth(stream):
        assert time.monotonic() < deadline
        await asyncio.sleep(POLL_S)


async def test_every_trajectory_is_scored_once(broker: Broker):
    records = [
        trajectory(rollout_task(broker_run(broker), group_id=n), answer="Ada" if n % 2 else "Eve")
        for n in range(40)
    ]
    await broker.publish_many(broker.keys.trajectories, records)
    async with working(broker) as worker:
        found = await take(broker, 40)
        await until_empty(broker, broker.keys.trajectories)
        assert worker.num_scored == 40
    for number, record in enumerate(records):
        reward = found[record.rollout_id].reward
        assert reward is not None
        assert (reward.total, reward.prediction) == ((1.0, "Ada") if number % 2 else (0.0, "Eve"))
        assert found[record.rollout_id].scored_at > 0
        assert found[record.rollout_id].trajectory.token_ids.tolist() == record.token_ids.tolist()


async def test_the_time_to_a_score_does_not_depend_on_the_clock_of_the_rollout_server(
    broker: Broker,
):
    ahead = time.time() + 86_400.0  # its clock is a day ahead
    record = trajectory(rollout_task(broker_run(broker)), started_at=ahead, latency_ms=2000.0)
    published = time.monotonic()
    await broker.publish(broker.keys.trajectories, record)
    await asyncio.sleep(0.3)  # what waits in the stream counts
    async with working(broker):
        (found,) = (await take(broker, 1)).values()
    took_s = found.scored_at - (ahead + 2.0)
    # Redis numbers entries in whole milliseconds.
    assert 0.3 - 0.002 <= took_s <= time.monotonic() - published


def broker_run(broker: Broker) -> str:
    return broker.keys.tasks.split(":")[1]


async def test_failed_trajectories_pass_without_a_reward(broker: Broker):
    failed = trajectory(rollout_task(group_id=1), status="FAILED", reason="tool_timeout: search")
    await broker.publish(broker.keys.trajectories, failed)
    async with working(broker) as worker:
        found = await take(broker, 1)
        assert worker.num_passed == 1
    assert found[failed.rollout_id].reward is None
    assert found[failed.rollout_id].trajectory.reason == "tool_timeout: search"


async def test_a_client_gets_its_scores_on_its_own_stream(broker: Broker):
    reply = broker.keys.replies("client-1")
    mine = trajectory(rollout_task(group_id=1, reply_stream=reply, purpose="eval"))
    learners = trajectory(rollout_task(group_id=2))
    await broker.publish_many(broker.keys.trajectories, [mine, learners])
    async with working(broker):
        assert set(await take(broker, 1, reply)) == {mine.rollout_id}
        assert set(await take(broker, 1)) == {learners.rollout_id}


async def test_garbage_is_dead_lettered_and_the_rest_goes_on(broker: Broker):
    good = trajectory(rollout_task(group_id=1))
    torn = dict(encode_entry(trajectory(rollout_task(group_id=2))))
    torn[b"array:token_ids"] = b"\x00"
    await broker.redis.xadd(broker.keys.trajectories, {b"nonsense": b"1"})
    await broker.redis.xadd(broker.keys.trajectories, torn)
    await broker.publish(broker.keys.trajectories, good)
    async with working(broker):
        assert set(await take(broker, 1)) == {good.rollout_id}
        await until_empty(broker, broker.keys.trajectories)
    reasons = [letter.reason for letter in await broker.dead_letters()]
    assert len(reasons) == 2
    assert "no field 'schema'" in reasons[0]
    assert "array field has 1 bytes" in reasons[1]


@pytest.mark.parametrize(
    ("component", "reason", "line"),
    [
        ("broken", "raised KeyError: 'tests'", 'raise KeyError("tests")'),
        (
            "not_a_number",
            "returned nan; it must return a finite number, or one and a text that says why",
            None,
        ),
    ],
)
async def test_a_trajectory_no_component_can_score_fails_at_once_and_says_why(
    broker: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    component: str,
    reason: str,
    line: str | None,
):
    (tmp_path / "broken_reward.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"broken_reward:{component}"
    reply = broker.keys.replies("client-1")
    await broker.publish(broker.keys.trajectories, trajectory(rollout_task(group_id=1)))
    asked = rollout_task(group_id=2, reply_stream=reply, purpose="eval")
    await broker.publish(broker.keys.trajectories, trajectory(asked))
    table = RewardConfig(components={"exact_match": 1.0, name: 1.0})
    async with working(broker, table) as worker:
        (failed,) = (await take(broker, 1)).values()
        (answer,) = (await take(broker, 1, reply)).values()
        await until_empty(broker, broker.keys.trajectories)
        assert (worker.num_dead, worker.num_scored) == (2, 0)
    text = f"reward_error: reward component '{name}' {reason}"
    for result in (failed, answer):
        assert (result.trajectory.status, result.trajectory.reason) == ("FAILED", text)
        assert result.reward is None
        assert len(result.trajectory.turns) == 1  # what the model wrote is kept, to be looked at
    assert [letter.reason for letter in await broker.dead_letters()] == [
        f"failed 3 times: {text}"
    ] * 2
    ((shown, count),) = await FailureBoard(broker).read()
    assert (shown.where, count) == ("reward", 6)  # two trajectories, three tries each
    assert shown.reason.startswith(text)
    if line is None:  # nothing of the user's raised: the reason is the whole story
        assert shown.reason == text
    else:
        assert line in shown.reason


class Service:
    """A reward service process."""

    def __init__(self, name: str, url: str, run_id: str, table: dict[str, Any], folder: Path):
        self.folder = folder / name
        self.folder.mkdir()
        self.log = self.folder / "log"
        env = os.environ | {"PYTHONPATH": str(folder), "HOLD_DIR": str(folder)}
        arguments = (url, run_id, json.dumps(table), str(self.folder))
        self.process = Forked(SERVE, *arguments, env=env, log=self.log)

    def wait_for(self, path: Path) -> None:
        """Wait until a file exists."""
        deadline = time.monotonic() + WAIT_S
        while not path.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(POLL_S)

    def url(self) -> str:
        """Return the announced URL."""
        self.wait_for(self.folder / "reward.json")
        return json.loads((self.folder / "reward.json").read_text())["url"]

    def kill(self) -> None:
        """End it as an outage would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(WAIT_S)


async def test_what_a_killed_worker_was_scoring_is_scored_by_another(
    broker: Broker, redis_url: str, tmp_path: Path
):
    (tmp_path / "held_reward.py").write_text(PLUGIN)
    table = {"components": {"exact_match": 1.0, "held_reward:held": 0.0}}
    run_id = broker_run(broker)
    record = trajectory(rollout_task(run_id, group_id=1))
    await broker.publish(broker.keys.trajectories, record)
    first = Service("first", redis_url, run_id, table, tmp_path)
    second = None
    try:
        await asyncio.to_thread(first.wait_for, tmp_path / "entered")
        assert await broker.depth(broker.keys.scored) == 0
        first.kill()
        second = Service("second", redis_url, run_id, table, tmp_path)
        found = await take(broker, 1)
        await until_empty(broker, broker.keys.trajectories)
    finally:
        first.kill()
        if second is not None:
            second.kill()
    reward = found[record.rollout_id].reward
    assert reward is not None
    assert reward.components["held_reward:held"] == 1.0


async def test_a_trajectory_that_kills_its_process_is_dead_lettered_and_the_rest_is_scored(
    broker: Broker, redis_url: str, tmp_path: Path
):
    (tmp_path / "deadly_reward.py").write_text(PLUGIN)
    table = {"components": {"exact_match": 1.0, "deadly_reward:deadly": 0.0}}
    run_id = broker_run(broker)
    records = [
        trajectory(rollout_task(run_id, group_id=group), answer="Ada" if group else "boom")
        for group in range(3)
    ]
    await broker.publish_many(broker.keys.trajectories, records)
    name = "reward component 'deadly_reward:deadly'"
    deaths = 0
    service = Service("0", redis_url, run_id, table, tmp_path)
    try:
        async with asyncio.timeout(3 * WAIT_S):
            while await broker.depth(broker.keys.trajectories):
                if service.process.poll() is not None:
                    assert service.process.returncode == -signal.SIGKILL, service.log.read_text()
                    deaths += 1
                    service = Service(str(deaths), redis_url, run_id, table, tmp_path)
                await asyncio.sleep(POLL_S)
        found = await take(broker, 3)
    finally:
        service.kill()
    assert deaths == 3  # once beside the others, twice alone
    assert [found[record.rollout_id].reward is None for record in records] == [True, False, False]
    failed = found[records[0].rollout_id].trajectory
    task_id = records[0].rollout.task.id
    assert (failed.status, failed.reason) == (
        "FAILED",
        f"reward_error: task {task_id!r}: its scoring ended 2 processes while nothing else was in "
        f"flight there, as a crash or a lack of memory does; the last time in {name}",
    )
    assert await broker.deadly_count() == 1
    [letter] = await broker.dead_letters()
    assert letter.key == records[0].rollout_id
    assert letter.reason.endswith(name)
    ((shown, count),) = await FailureBoard(broker).read()
    assert (shown.where, shown.reason, count) == ("reward", failed.reason, 1)


async def test_the_service_scores_both_ways_and_stops_cleanly(
    broker: Broker, redis_url: str, tmp_path: Path
):
    run_id = broker_run(broker)
    service = Service("service", redis_url, run_id, {"rule": "paper"}, tmp_path)
    try:
        record = trajectory(rollout_task(run_id, group_id=1), answer="Eve")
        await broker.publish(broker.keys.trajectories, record)
        found = await take(broker, 1)
        url = await asyncio.to_thread(service.url)
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
            body = {"payload": {"answers": ["Ada"]}, "turns": [{"text": "Ada"}]}
            over_http = (await http.post("/score", json=body)).json()
            health = (await http.get("/healthz")).json()
        service.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.process.wait, WAIT_S) == 0, service.log.read_text()
    finally:
        service.kill()
    reward = found[record.rollout_id].reward
    assert reward is not None
    assert reward.total == 0.0  # right format, wrong answer
    # By hand: no turn but the last, which is fine; the last is not: format 0.5, so 0.5 - 1.
    assert (over_http["total"], over_http["prediction"]) == (-0.5, None)
    assert health == {
        "status": "ok",
        "in_flight": 0,
        "scored": 1,
        "passed_on_failed": 0,
        "dead_lettered": 0,
    }
