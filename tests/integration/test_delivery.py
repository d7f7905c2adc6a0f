"""The learner owns the work, the streams only carry it: each promise against a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_r1.learner.stop_rules import RunFailedError
from agent_r1.learner.train import Learner
from agent_r1.runtime.evaluation_client import EvalClient, summarise
from agent_r1.runtime.files.run_folder import LEDGER_FILE
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutKey, RolloutTask, Task
from agent_r1_proto.trajectory import ToolCallRecord, Trajectory
from agent_r1_proto.weights import NewestVersion
from tests.conftest import REPOSITORY, RedisServer
from tests.support.builders import rollout_task
from tests.support.fakes import running
from tests.support.learner_fakes import (
    KILL_CODE,
    FakeEngine,
    FakeServices,
    answered,
    eventually,
    samples_of,
    training_spec,
)
from tests.support.runs import summary

pytestmark = pytest.mark.redis

RUN_TIMEOUT_S = 60.0


async def train(learner: Learner) -> None:
    await asyncio.wait_for(learner.run(), RUN_TIMEOUT_S)


@contextlib.asynccontextmanager
async def services_of(url: str, run_id: str, **options: Any) -> AsyncIterator[FakeServices]:
    async with (
        await Broker.connect(url, run_id, lease_s=2.0) as broker,
        FakeServices(broker, **options).running() as services,
    ):
        yield services


@contextlib.asynccontextmanager
async def learner_process(**settings: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    script = REPOSITORY / "tests" / "support" / "learner_process.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        json.dumps(settings),
        cwd=REPOSITORY,
        env={"PYTHONPATH": "."},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_late_zombie_duplicate_is_dropped_and_counted(
    tmp_path: Path, redis_url: str, run_id: str
):
    zombies: list[ScoredTrajectory] = []

    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory | None:
        # The first worker on sample 0 of group 0 hangs; the sample is issued again.
        key = rollout.key
        if (key.group_id, key.sample_index, key.attempt) == (0, 0, 0):
            zombies.append(answered(rollout, version))
            return None
        return answered(rollout, version)

    engine = FakeEngine(train_s=0.3)
    spec = training_spec(tmp_path / "run", redis_url, run_id, sample_timeout_s=0.7)
    async with services_of(redis_url, run_id, answer=answer) as services:
        running = asyncio.create_task(train(Learner(spec, engine)))
        await eventually(lambda: len(engine.batches) == 1)
        await services.publish(zombies[0])
        await running
    assert engine.trained == samples_of(range(6))
    attempts = {
        s.trajectory.rollout.key.attempt
        for s in services.published
        if s.trajectory.rollout.key.group_id == 0 and s.trajectory.rollout.key.sample_index == 0
    }
    assert attempts == {0, 1}
    results = summary(tmp_path / "run")["results"]
    assert results["duplicate"] == 1
    assert results["reissued"] == 1


async def test_a_killed_learner_resumes_and_trains_every_sample_exactly_once(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    settings = {
        "folder": str(folder),
        "redis_url": redis_url,
        "run_id": run_id,
        "steps": 6,
        "checkpoint_every": 2,
        "max_staleness": 1,
    }
    async with services_of(redis_url, run_id) as services:
        async with learner_process(**settings, kill_at=4) as process:
            assert await asyncio.wait_for(process.wait(), RUN_TIMEOUT_S) == KILL_CODE
        before = json.loads((folder / LEDGER_FILE).read_text())
        async with learner_process(**settings, kill_at=6, resume=True) as process:
            assert await asyncio.wait_for(process.wait(), RUN_TIMEOUT_S) == KILL_CODE
        engine = FakeEngine()
        spec = training_spec(
            folder,
            redis_url,
            run_id,
            resume=True,
            steps=6,
            checkpoint_every=2,
            max_staleness=1,
        )
        await train(Learner(spec, engine))
    # The weights that came out were trained on 6 batches of 2 groups, on nothing twice.
    assert sorted(engine.trained) == samples_of(range(12))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    after = json.loads((folder / LEDGER_FILE).read_text())
    assert (before["incarnation"], after["incarnation"]) == (1, 3)
    # Steps 1-3, then a resume and steps 3-5, then a resume and steps 5-6: no version twice.
    assert after["last_policy_version"] == 3 + (1 + 3) + (1 + 2)
    # Nothing waited for the last push of those that were killed.
    assert services.loads == sorted(set(services.loads))
    assert {*range(1, 11)} - {3, 7} <= set(services.loads)
    assert {s.trajectory.rollout.key.incarnation for s in services.published} == {1, 2, 3}


async def test_a_learner_killed_before_its_first_checkpoint_starts_over_as_the_next_incarnation(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    async with services_of(redis_url, run_id) as services:
        async with learner_process(
            folder=str(folder), redis_url=redis_url, run_id=run_id, kill_at=2
        ) as process:
            assert await asyncio.wait_for(process.wait(), RUN_TIMEOUT_S) == KILL_CODE
        engine = FakeEngine()
        await train(Learner(training_spec(folder, redis_url, run_id, resume=True), engine))
    assert engine.trained == samples_of(range(6))
    assert services.loads == [1, 2, 3, 4, 5]  # 1 by the first start; then 0 steps republished as 2


async def test_sigterm_ends_the_process_in_order_and_resume_goes_on(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    settings = {"redis_url": redis_url, "run_id": run_id, "steps": 40}
    async with services_of(redis_url, run_id) as services:
        async with learner_process(folder=str(folder), **settings, train_s=0.05) as process:
            await eventually(lambda: len(services.loads) >= 2, timeout_s=RUN_TIMEOUT_S)
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), RUN_TIMEOUT_S) == 0
            assert time.monotonic() - started < 30.0
        assert summary(folder)["status"] == "interrupted"
        stopped_at = summary(folder)["steps"]
        engine = FakeEngine()
        spec = training_spec(folder, redis_url, run_id, resume=True, steps=stopped_at + 1)
        await train(Learner(spec, engine))
    assert sorted(engine.trained) == samples_of(range(2 * (stopped_at + 1)))


async def test_results_of_an_old_incarnation_are_dropped(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    async with services_of(redis_url, run_id) as services:
        # Left over from an earlier start of the learner: one result unread, one task not taken.
        old = rollout_task(run_id, incarnation=0, group_id=0, sample_index=0)
        await services.publish(answered(old, 0))
        engine = FakeEngine()
        await train(Learner(training_spec(folder, redis_url, run_id), engine))
    assert engine.trained == samples_of(range(6))
    assert summary(folder)["results"]["old_incarnation"] == 1


async def test_redis_away_in_the_middle_loses_nothing(
    tmp_path: Path, redis_server: RedisServer, run_id: str
):
    engine = FakeEngine(train_s=0.05)
    spec = training_spec(tmp_path / "run", redis_server.url, run_id, steps=8)
    async with services_of(redis_server.url, run_id):
        running = asyncio.create_task(train(Learner(spec, engine)))
        await eventually(lambda: engine.steps >= 2, running)
        await asyncio.to_thread(redis_server.kill)
        await asyncio.sleep(0.5)
        assert not running.done()
        await asyncio.to_thread(redis_server.start)
        await running
    assert sorted(engine.trained) == samples_of(range(16))


async def test_a_redis_that_comes_back_empty_gets_the_work_again(
    tmp_path: Path, redis_server: RedisServer, run_id: str
):
    engine = FakeEngine(train_s=0.05)
    spec = training_spec(tmp_path / "run", redis_server.url, run_id, steps=8)
    lost: set[RolloutKey] = set()

    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory | None:
        if rollout.key.group_id < 4:
            return answered(rollout, version)
        lost.add(rollout.key)
        return None

    async with (
        await Broker.connect(redis_server.url, run_id) as other,
        services_of(redis_server.url, run_id, answer=answer) as services,
    ):
        running = asyncio.create_task(train(Learner(spec, engine)))
        # Two steps are trained, and the credits are spent on the two groups that are lost.
        await eventually(lambda: len(lost) == 4, running)
        await other.redis.flushall()
        services.answer = answered
        await running
    assert sorted(engine.trained) == samples_of(range(16))
    assert summary(tmp_path / "run")["results"]["reissued"] >= len(lost)
    (emptied,) = summary(tmp_path / "run")["conditions"]
    assert emptied["what"].startswith("Redis has lost the run's data: it was emptied")
    assert (emptied["times"], emptied["lasts"]) == (1, False)


async def test_a_run_in_which_everything_fails_stops_with_the_reason(
    tmp_path: Path, redis_url: str, run_id: str, caplog: pytest.LogCaptureFixture
):
    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory:
        reason = f"tool_timeout: search did not answer call {rollout.key.group_id}"
        return answered(rollout, version, status="FAILED", reason=reason)

    spec = training_spec(tmp_path / "run", redis_url, run_id)
    engine = FakeEngine()
    async with services_of(redis_url, run_id, answer=answer):
        with pytest.raises(RunFailedError) as caught:
            await train(Learner(spec, engine))
    # Two batches of 2 groups of 2: the rule looks at 8 samples.
    assert "8 of the last 8 samples failed (100%)" in str(caught.value)
    # Counted by kind, shown as the first of them said it.
    assert re.search(r"8 x tool_timeout: search did not answer call \d\.", str(caught.value))
    assert str(tmp_path / "run" / "logs") in str(caught.value)
    assert engine.trained == []
    assert caplog.text.count("first failure of its kind") == 1
    result = summary(tmp_path / "run")
    assert result["status"] == "failed"
    assert result["failures"] == {"tool_timeout: search did not answer call #": 8}


async def test_a_tool_that_always_raises_stops_the_run_with_its_error(
    tmp_path: Path, redis_url: str, run_id: str
):
    call = ToolCallRecord(
        end_token_index=7, tool="search", status="error", error="ValueError: no index at shard 3"
    )
    spec = training_spec(tmp_path / "run", redis_url, run_id, steps=20)

    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory:
        return answered(rollout, version, calls=[call])

    async with services_of(redis_url, run_id, answer=answer):
        with pytest.raises(RunFailedError, match=r"ValueError: no index at shard \d"):
            await train(Learner(spec, FakeEngine()))


async def test_a_run_without_progress_stops(tmp_path: Path, redis_url: str, run_id: str):
    spec = training_spec(tmp_path / "run", redis_url, run_id, stall_timeout_s=1.0)
    async with services_of(redis_url, run_id, answer=lambda rollout, version: None):
        with pytest.raises(RunFailedError, match=r"stall_timeout_s allows 1 s"):
            await train(Learner(spec, FakeEngine()))


async def test_failed_groups_are_replaced_by_new_prompts(
    tmp_path: Path, redis_url: str, run_id: str
):
    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory:
        failed = rollout.key.group_id == 1
        return answered(rollout, version, status="FAILED" if failed else "COMPLETED")

    engine = FakeEngine()
    spec = training_spec(tmp_path / "run", redis_url, run_id, max_failed_share=1.0)
    async with services_of(redis_url, run_id, answer=answer):
        await train(Learner(spec, engine))
    assert sorted(engine.trained) == samples_of([0, 2, 3, 4, 5, 6])
    assert summary(tmp_path / "run")["results"]["dropped_groups"] == 1


async def test_two_runs_on_one_redis_do_not_touch_each_other(
    tmp_path: Path, redis_url: str, run_id: str
):
    engines = [FakeEngine(train_s=0.02), FakeEngine(train_s=0.02)]
    names = [f"{run_id}-a", f"{run_id}-b"]
    async with (
        services_of(redis_url, names[0]) as first,
        services_of(redis_url, names[1]) as second,
    ):
        specs = [
            training_spec(tmp_path / name, redis_url, name, steps=steps)
            for name, steps in zip(names, (3, 5), strict=True)
        ]
        learners = [Learner(s, e) for s, e in zip(specs, engines, strict=True)]
        await asyncio.gather(*(train(learner) for learner in learners))
    assert engines[0].trained == samples_of(range(6))
    assert engines[1].trained == samples_of(range(10))
    assert {rollout.key.run_id for rollout in first.seen} == {names[0]}
    assert {rollout.key.run_id for rollout in second.seen} == {names[1]}
    assert (first.loads, second.loads) == ([1, 2, 3], [1, 2, 3, 4, 5])


async def test_a_second_learner_on_the_same_run_ends_the_first(
    tmp_path: Path, redis_url: str, run_id: str
):
    engine = FakeEngine(train_s=0.1)
    spec = training_spec(tmp_path / "run", redis_url, run_id, steps=100)
    async with services_of(redis_url, run_id) as services:
        running = asyncio.create_task(train(Learner(spec, engine)))
        await eventually(lambda: engine.steps >= 1, running)
        await services.registry.set_incarnation(2)
        with pytest.raises(RunFailedError, match="has taken over this run"):
            await running


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


async def test_a_suspended_learner_that_wakes_up_after_its_successor_writes_nothing(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    settings = {"redis_url": redis_url, "run_id": run_id, "steps": 6, "checkpoint_every": 1}
    async with services_of(redis_url, run_id):
        async with learner_process(folder=str(folder), train_s=0.4, **settings) as zombie:
            await eventually(lambda: (folder / "checkpoints" / "step_000002").exists())
            zombie.send_signal(signal.SIGSTOP)
            with pytest.raises(ValueError, match=rf"is writing .* process {zombie.pid} on"):
                training_spec(folder, resume=True, **settings)
            # As where locks do not reach: the run continues on another machine.
            (folder / "learner.lock").unlink()
            engine = FakeEngine()
            learner = Learner(training_spec(folder, resume=True, **settings), engine)
            await train(learner)
            assert sorted(engine.trained) == samples_of(range(12))
            left = contents(folder)
            zombie.send_signal(signal.SIGCONT)
            _, error = await asyncio.wait_for(zombie.communicate(), RUN_TIMEOUT_S)
        assert zombie.returncode == 1
        assert b"learner start 2 has taken over" in error, error.decode()
        assert contents(folder) == left


async def test_a_woken_learner_gives_its_successors_results_back(
    tmp_path: Path, redis_url: str, run_id: str
):
    spec = training_spec(tmp_path / "run", redis_url, run_id)
    heirs = answered(rollout_task(run_id, incarnation=2), 0)
    async with await Broker.connect(redis_url, run_id, lease_s=2.0) as broker:
        async with FakeServices(broker, answer=lambda rollout, version: None).running() as services:
            running = asyncio.create_task(train(Learner(spec, FakeEngine())))
            await eventually(lambda: bool(services.seen), running)
            await services.publish(heirs)
            with pytest.raises(RunFailedError, match="learner start 2 has taken over this run"):
                await running
        consumer = broker.consumer(
            broker.keys.scored, ScoredTrajectory, group="learner", consumer="learner"
        )
        async with consumer:
            [entry] = await consumer.read(1, 5.0)
    assert entry.message.trajectory.rollout_id == heirs.trajectory.rollout_id


async def test_a_question_without_an_answer_is_asked_again_and_answered_once(
    redis_url: str, run_id: str
):
    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory | None:
        lost = rollout.task.id == "q1" and rollout.key.attempt == 0
        return None if lost else answered(rollout, version)

    tasks = [Task(id=f"q{i}", prompt="who?", metadata={"set": "s"}) for i in range(5)]
    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker, answer=answer)
        client = EvalClient(
            broker, run_id=run_id, client_id="c", sample_timeout_s=0.3, max_in_flight=2
        )
        async with services.running():
            await services.registry.set_newest_version(NewestVersion(policy_version=0))
            late = rollout_task(run_id, group_id=0, reply_stream=broker.keys.replies("c"))
            zombie = late.replace(task=tasks[0], purpose="eval")
            await services.publish(answered(zombie, 0))
            results = await asyncio.wait_for(client.run(tasks), RUN_TIMEOUT_S)
        assert [result.task.id for result in results] == ["q0", "q1", "q2", "q3", "q4"]
        assert not any(result.failed for result in results)
        assert summarise(results)["s"].n == 5
        asked = [rollout.task.id for rollout in services.seen]
        assert sorted(asked) == ["q0", "q1", "q1", "q2", "q3", "q4"]
        assert await broker.depth(broker.keys.replies("c")) == 0


async def misread(broker: Broker, stream: str) -> None:
    """Read a stream as a service of another release does, which can parse nothing in it."""
    async with broker.consumer(stream, Trajectory, group="old", consumer="old") as consumer:
        while True:
            await consumer.read(8, 0.1)


@pytest.mark.parametrize("payload_bytes", [10, 100_000])
async def test_a_question_that_no_service_can_read_fails_at_once(
    payload_bytes: int, redis_url: str, run_id: str
):
    """Whether its dead letter is kept whole or cut."""
    tasks = [Task(id=f"q{i}", prompt="who?", payload={"x": "x" * payload_bytes}) for i in range(3)]
    async with await Broker.connect(redis_url, run_id) as broker:
        client = EvalClient(broker, run_id=run_id, client_id="c")
        async with running(misread(broker, broker.keys.tasks)):
            results = await asyncio.wait_for(client.run(tasks), RUN_TIMEOUT_S)
            assert {result.failed for result in results} == {True}
            assert "unreadable_entry: tasks: stream entry has schema" in results[0].reason
        # What was found unreadable before a question is asked says nothing about it.
        services = FakeServices(broker, answer=answered)
        await services.registry.set_newest_version(NewestVersion(policy_version=0))
        async with services.running():
            results = await asyncio.wait_for(client.run(tasks), RUN_TIMEOUT_S)
        assert not any(result.failed for result in results)


async def test_what_another_client_asked_in_vain_fails_no_question(redis_url: str, run_id: str):
    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory | None:
        return None if rollout.key.attempt == 0 else answered(rollout, version)

    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker, answer=answer)
        await services.registry.set_newest_version(NewestVersion(policy_version=0))
        client = EvalClient(broker, run_id=run_id, client_id="c", sample_timeout_s=2.0)
        others = rollout_task(run_id, incarnation=0, group_id=0)
        others = others.replace(reply_stream=broker.keys.replies("other"), purpose="eval")
        async with services.running():
            asking = asyncio.create_task(client.run([Task(id="q0", prompt="who?")]))
            await eventually(lambda: bool(services.seen), asking)
            await broker.publish(broker.keys.scored, others)
            async with running(misread(broker, broker.keys.scored)):
                [result] = await asyncio.wait_for(asking, RUN_TIMEOUT_S)
        assert len(await broker.dead_letters()) == 1
        assert not result.failed


async def test_questions_nobody_answers_count_as_failed_when_time_is_up(
    redis_url: str, run_id: str
):
    tasks = [Task(id="q0", prompt="who?")]
    async with await Broker.connect(redis_url, run_id) as broker:
        client = EvalClient(broker, run_id=run_id, client_id="c", timeout_s=0.3)
        results = await asyncio.wait_for(client.run(tasks), RUN_TIMEOUT_S)
    assert results[0].failed
    assert results[0].reason == "no result in time"
    scores = summarise(results)["all"]
    assert (scores.n, scores.failed, scores.em) == (0, 1, None)
