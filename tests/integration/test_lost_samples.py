"""What Redis loses of the samples under way is asked for again, from a real Redis."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from redis import exceptions as redis_errors

from agent_r1.learner.train import Learner
from agent_r1.runtime.evaluation_client import EvalClient
from agent_r1_proto.failures import FailureBoard
from agent_r1_proto.lost_samples import LostSamples
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask, Task
from agent_r1_proto.weights import NewestVersion
from tests.support.builders import rollout_task, trajectory
from tests.support.learner_fakes import (
    FakeEngine,
    FakeServices,
    answered,
    samples_of,
    training_spec,
)

pytestmark = pytest.mark.redis

LEASE_S = 0.4
LEARNER_LEASE_S = 2.0  # of training_spec
WAIT_S = 30.0


async def found_by(lost: LostSamples, asked: set[str], within_s: float) -> set[str]:
    """Compare again and again until something is lost, or the time is over."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if found := await lost.find(asked):
            return found
        await asyncio.sleep(0.01)
    return set()


async def until_waiting(broker: Broker, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while await broker.depth(broker.keys.tasks) < count:  # noqa: ASYNC110 - Redis has it
            await asyncio.sleep(0.02)


async def test_only_samples_in_no_stream_are_lost(redis_url: str, run_id: str):
    async with await Broker.connect(redis_url, run_id, lease_s=LEASE_S) as broker:
        keys = broker.keys
        waiting, taken, moved, repeated, scored, gone = (
            rollout_task(run_id, incarnation=1, group_id=group) for group in range(6)
        )
        questions = [rollout_task(run_id, incarnation=0, group_id=group) for group in range(6)]
        await broker.publish(keys.tasks, taken)
        consumer = broker.consumer(keys.tasks, RolloutTask, group="rollout", consumer="r")
        async with consumer:
            [_] = await consumer.read(1, 1.0)
            # As many entries as samples: only the keys tell that one is missing.
            await broker.publish_many(keys.tasks, [waiting, *questions])
            again = repeated.key.model_copy(update={"attempt": 1})
            records = [trajectory(moved), trajectory(repeated.replace(key=again))]
            await broker.publish_many(keys.trajectories, records)
            await broker.publish(keys.scored, answered(scored, 0))
            asked = {str(one.key) for one in (waiting, taken, moved, repeated, scored, gone)}
            assert await found_by(LostSamples(broker), asked, 8 * LEASE_S) == {str(gone.key)}


async def test_a_loss_is_found_one_to_two_leases_after_redis_answers_again(
    redis_url: str, run_id: str
):
    key = str(rollout_task(run_id).key)
    async with await Broker.connect(redis_url, run_id, lease_s=LEASE_S) as broker:
        lost = LostSamples(broker)
        assert await found_by(lost, {key}, 4 * LEASE_S) == {key}
        assert await lost.find({key}) == set()  # one comparison has found it again, not two
        broker.answers_since = started = time.monotonic()
        assert await found_by(lost, {key}, 4 * LEASE_S) == {key}
        # The first comparison after 1 lease, the second half a lease later.
        assert 1.5 * LEASE_S <= time.monotonic() - started < 2 * LEASE_S


async def test_a_connection_that_is_stale_long_after_a_restart_is_no_outage(
    redis_url: str, run_id: str
):
    async with await Broker.connect(redis_url, run_id, lease_s=4.0) as broker:

        async def fail_for(seconds: float, *, others_answer: bool) -> None:
            ended = time.monotonic() + seconds

            async def ping() -> None:
                if time.monotonic() < ended:
                    if others_answer:
                        await broker.retrying(broker.redis.ping, "another connection")
                    raise redis_errors.ConnectionError("Connection closed by server.")
                await broker.redis.ping()

            await broker.retrying(ping, "ping")

        since = broker.answers_since
        await fail_for(0.2, others_answer=True)
        assert broker.answers_since == since
        await fail_for(2.0, others_answer=False)  # longer than AWAY_S
        assert broker.answers_since > since


async def test_a_client_misses_its_own_questions_only(redis_url: str, run_id: str):
    async with await Broker.connect(redis_url, run_id, lease_s=LEASE_S) as broker:
        names = [broker.keys.replies(name) for name in ("a", "b")]
        here, gone = (
            rollout_task(run_id, incarnation=0, group_id=group, reply_stream=names[0])
            for group in range(2)
        )
        others = gone.replace(reply_stream=names[1])
        await broker.publish_many(broker.keys.tasks, [here, others])
        asked = {str(here.key), str(gone.key)}
        assert await found_by(LostSamples(broker, names[0]), asked, 8 * LEASE_S) == {str(gone.key)}


async def test_a_run_goes_on_when_redis_has_lost_waiting_tasks(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    engine = FakeEngine()
    spec = training_spec(folder, redis_url, run_id, max_staleness=1)
    async with await Broker.connect(redis_url, run_id, lease_s=LEARNER_LEASE_S) as broker:
        services = FakeServices(broker)
        learning = asyncio.create_task(Learner(spec, engine).run())
        await until_waiting(broker, 8)  # credits: 2 batches of 2 groups of 2 samples
        # Evaluation entries remain, in the same number.
        questions = [rollout_task(run_id, incarnation=0, purpose="eval") for _ in range(8)]
        await broker.redis.delete(broker.keys.tasks)
        await broker.publish_many(broker.keys.tasks, questions)
        started = time.monotonic()
        await until_waiting(broker, 16)
        assert time.monotonic() - started < 2 * LEARNER_LEASE_S
        async with services.running():
            await asyncio.wait_for(learning, WAIT_S)
    assert sorted(engine.trained) == samples_of(range(6))
    attempts = {s.key.attempt for s in services.seen if s.purpose == "train"}
    assert attempts == {0}
    result = json.loads((folder / "summary.json").read_text())
    assert result["results"]["lost"] == 8
    assert result["failed_samples"] == 0
    shown = [json.loads(line) for line in (folder / "failures.jsonl").read_text().splitlines()]
    assert [one["reason"].split(" were")[0] for one in shown] == ["lost_in_redis: 8 samples"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert (lines[-1]["results/lost"], lines[-1]["failures/attempts"]) == (8.0, 0.0)


async def test_what_is_not_published_yet_is_not_lost(tmp_path: Path, redis_url: str, run_id: str):
    """A full Redis takes no tasks, and still answers what is in its streams."""
    spec = training_spec(tmp_path / "run", redis_url, run_id, steps=1)
    published: list[str] = []

    async with await Broker.connect(redis_url, run_id, lease_s=LEARNER_LEASE_S) as broker:
        services = FakeServices(broker)
        taken = asyncio.Event()
        publish_many = Broker.publish_many

        async def slow(self: Broker, stream: str, messages: list[RolloutTask]) -> None:
            if stream == self.keys.tasks and messages:
                published.extend(str(message.key) for message in messages)
                if not taken.is_set():
                    taken.set()
                    await asyncio.sleep(2 * LEARNER_LEASE_S)
            await publish_many(self, stream, messages)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Broker, "publish_many", slow)
            async with services.running():
                await asyncio.wait_for(Learner(spec, FakeEngine()).run(), WAIT_S)
    assert len(published) == len(set(published))


async def test_a_question_that_redis_lost_is_asked_again_as_it_was(redis_url: str, run_id: str):
    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory | None:
        # The first time, the entry of one question vanishes.
        vanishes = rollout.task.id == "q1" and len(services.seen) <= 3
        return None if vanishes else answered(rollout, version)

    tasks = [Task(id=f"q{i}", prompt="who?") for i in range(3)]
    async with await Broker.connect(redis_url, run_id, lease_s=LEASE_S) as broker:
        services = FakeServices(broker, answer=answer)
        await services.registry.set_newest_version(NewestVersion(policy_version=0))
        client = EvalClient(broker, run_id=run_id, client_id="c")
        async with services.running():
            results = await asyncio.wait_for(client.run(tasks), WAIT_S)
        assert not any(result.failed for result in results)
        seen = [(rollout.task.id, rollout.key.attempt) for rollout in services.seen]
        assert seen == [("q0", 0), ("q1", 0), ("q2", 0), ("q1", 0)]
        [(shown, count)] = await FailureBoard(broker).read()
    assert (shown.where, count) == ("evaluation", 1)
    assert shown.reason.startswith("lost_in_redis: 1 samples")
