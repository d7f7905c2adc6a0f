"""The rollout server: samples become trajectories, each once."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import httpx
import pytest

from agent_r1.text.tokens import failed_trajectory
from agent_r1_proto.failures import FailureBoard
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.trajectory import Trajectory
from tests.support.fakes import FakeToolServer
from tests.support.rollout_bench import (
    ANSWER,
    SEARCH,
    Bench,
    keys,
    task,
    until,
    until_empty,
    until_true,
)

pytestmark = pytest.mark.redis
LEASE_S = 0.5


async def test_samples_become_trajectories_and_leave_the_stream(bench: Bench):
    async with FakeToolServer() as search:
        policy = bench.policy(SEARCH, ANSWER)
        async with bench.server(policy, search):
            samples = [task(bench, group_id=g, sample_index=s) for g in (0, 1) for s in (0, 1)]
            await bench.submit(*samples)
            done = await bench.trajectories(4)
            await until_empty(bench)
            (server,) = await bench.registry.rollout_servers()
            async with httpx.AsyncClient() as client:
                health = (await client.get(f"{bench.url}/healthz")).json()
        assert await bench.registry.rollout_servers() == []
    assert keys(done) == [(1, 0, 0, 0), (1, 0, 1, 0), (1, 1, 0, 0), (1, 1, 1, 0)]
    assert {(t.status, t.reason, len(t.turns)) for t in done} == {("COMPLETED", "answer", 2)}
    assert [t.rollout for t in done] == samples
    assert server.url.startswith("http://127.0.0.1:")
    assert done[0].server_id == server.server_id
    assert health == {
        "status": "ok",
        "server_id": server.server_id,
        "policy_version": 0,
        "in_flight": 0,
    }
    assert len({request.seed for request in policy.requests}) == 8  # 4 samples of 2 turns


async def test_malformed_call_is_answered_and_the_trajectory_goes_on(bench: Bench):
    async with FakeToolServer() as search:
        policy = bench.policy("<tool_call>search Ada</tool_call>", SEARCH, ANSWER)
        async with bench.server(policy, search):
            await bench.submit(task(bench))
            (done,) = await bench.trajectories(1)
    assert done.status == "COMPLETED"
    assert [call.status for call in done.calls()] == ["malformed", "ok"]
    assert "Error: the tool call is not valid JSON" in bench.chat.decode(done.token_ids.tolist())


async def test_tool_that_is_down_fails_the_sample_after_all_attempts(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    async with FakeToolServer(always=503) as search:
        async with bench.server(bench.policy(SEARCH, ANSWER), search):
            samples = [task(bench, sample_index=i, max_attempts=3) for i in range(3)]
            await bench.submit(*samples)
            done = await bench.trajectories(3)
            await until_empty(bench)
        assert sorted({call.rollout_id.rsplit("/", 1)[1] for call in search.calls}) == [
            "0",
            "1",
            "2",
        ]
    assert keys(done) == [(1, 0, 0, 2), (1, 0, 1, 2), (1, 0, 2, 2)]
    assert {(t.status, t.reason.split(": ")[0]) for t in done} == {("FAILED", "tool_busy")}
    # Nine attempts failed the same way; the first is shown with what happened, the rest counted.
    (shown,) = [
        r.getMessage()
        for r in caplog.records
        if r.levelno == logging.WARNING and "attempt failed" in r.getMessage()
    ]
    assert "out of order" in shown


async def test_attempt_after_a_short_outage_succeeds(bench: Bench):
    async with (
        FakeToolServer(statuses=[500]) as search,
        bench.server(bench.policy(SEARCH, ANSWER), search),
    ):
        await bench.submit(task(bench))
        (done,) = await bench.trajectories(1)
    assert (done.status, done.rollout.key.attempt) == ("COMPLETED", 1)


async def test_a_lost_session_is_nobodys_failure_and_costs_no_attempt(bench: Bench):
    # open, call, close of two attempts that lose their session; the third keeps it
    statuses = [200, 409, 200, 200, 409, 200]
    async with (
        FakeToolServer(sessions=True, statuses=statuses) as search,
        bench.server(bench.policy(SEARCH, SEARCH, SEARCH, ANSWER), search),
    ):
        await bench.submit(task(bench, max_attempts=1))
        (done,) = await bench.trajectories(1)
    assert (done.status, done.rollout.key.attempt) == ("COMPLETED", 2)
    assert len(search.opened) == 3
    assert sorted(search.closed) == sorted(search.opened)


async def test_samples_of_an_earlier_incarnation_are_dropped(bench: Bench):
    await bench.registry.set_incarnation(2)
    async with bench.server(bench.policy(ANSWER)):
        await bench.submit(
            task(bench, incarnation=1, group_id=0),
            task(bench, incarnation=1, group_id=1, purpose="eval"),
            task(bench, incarnation=2, group_id=2),
        )
        done = await bench.trajectories(2)
        await until_empty(bench)
    assert keys(done) == [(1, 1, 0, 0), (2, 2, 0, 0)]
    assert await bench.broker.depth(bench.broker.keys.trajectories) == 0


async def test_samples_in_flight_of_an_earlier_incarnation_are_stopped(bench: Bench):
    policy = bench.gated_policy(asyncio.Event())
    async with bench.server(policy, rollout={"announce_expiry_s": 0.3}):
        await bench.submit(task(bench))
        await until(lambda: policy.num_in_flight == 1)
        await bench.registry.set_incarnation(2)
        await until_empty(bench)
        assert policy.num_in_flight == 0


async def test_a_sample_that_is_asked_for_twice_is_made_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
):
    gate = asyncio.Event()
    policy = bench.gated_policy(gate)
    async with bench.server(policy):
        await bench.submit(*[task(bench)] * 3, task(bench, sample_index=1))
        await until(lambda: policy.num_in_flight == 2)

        async def repeats_are_gone() -> bool:
            return await bench.broker.depth(bench.broker.keys.tasks) == 2

        await until_true(repeats_are_gone)
        gate.set()
        done = await bench.trajectories(2)
        await until_empty(bench)
    assert keys(done) == [(1, 0, 0, 0), (1, 0, 1, 0)]
    assert len(policy.requests) == 2
    assert await bench.broker.dead_letters() == []
    shown = [r for r in caplog.records if "asked for twice" in r.message and r.levelname != "DEBUG"]
    assert len(shown) == 1


async def test_an_attempt_that_the_learner_has_asked_for_already_is_skipped(bench: Bench):
    # Attempt 0 fails while attempt 1 is under way; so its own next one is attempt 2.
    first, gate = asyncio.Event(), asyncio.Event()
    attempts: list[int] = []

    async def run(_: object, rollout: RolloutTask) -> Trajectory:
        attempts.append(rollout.key.attempt)
        await (first if rollout.key.attempt == 0 else gate).wait()
        return failed_trajectory(rollout, "tool_timeout: search")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agent_r1.rollout.agent_loop.AgentLoop.run", run)
        async with bench.server(bench.policy(ANSWER)):
            retried = task(bench).key.model_copy(update={"attempt": 1})
            await bench.submit(task(bench), task(bench).replace(key=retried, max_attempts=2))
            await until(lambda: attempts == [0, 1])
            first.set()
            await until(lambda: attempts == [0, 1, 2])
            gate.set()
            await until_empty(bench)


async def test_questions_of_two_clients_with_one_number_are_both_answered(bench: Bench):
    gate = asyncio.Event()
    policy = bench.gated_policy(gate)
    replies = [bench.broker.keys.replies(name) for name in ("chat", "evaluation")]
    asked = [task(bench, purpose="eval", incarnation=0, reply_stream=reply) for reply in replies]
    async with bench.server(policy):
        await bench.submit(*asked)
        await until(lambda: policy.num_in_flight == 2)
        gate.set()
        done = await bench.trajectories(2)
    assert {one.rollout.reply_stream for one in done} == set(replies)
    assert len({request.request_id for request in policy.requests}) == 2


async def test_a_sample_that_ends_its_servers_fails_and_names_what_was_at_work(bench: Bench):
    broker, tasks = bench.broker, bench.broker.keys.tasks
    await bench.submit(task(bench))
    entry_id = ""
    with suppress(RuntimeError):  # as a process ends that is killed: it gives nothing back
        async with broker.consumer(
            tasks, RolloutTask, group="rollout", consumer="killed"
        ) as consumer:
            entry_id = (await consumer.read(1, 1.0))[0].entry_id
            raise RuntimeError
    suspects = broker.keys.suspects(tasks)
    fields = [entry_id, f"{entry_id}/component"]
    gate = asyncio.Event()
    async with bench.server(bench.gated_policy(gate), lease_s=LEASE_S):

        async def is_alone() -> bool:
            return await broker.redis.hmget(suspects, fields) == [b"1", b"the engine"]

        await until_true(is_alone)
    # The server has stopped in order, and gave the sample back: no end is counted.
    assert await broker.redis.hget(suspects, entry_id) == b"0"
    await broker.redis.hset(suspects, entry_id, "2")  # as after two that did not
    async with bench.server(bench.policy(ANSWER), lease_s=LEASE_S):
        (done,) = await bench.trajectories(1)
    assert (done.status, done.reason) == (
        "FAILED",
        f"rollout_error: task {done.rollout.task.id!r}: its rollout ended 2 processes while "
        "nothing else was in flight there, as a crash or a lack of memory does; the last time in "
        "the engine",
    )
    [letter] = await broker.dead_letters()
    assert letter.key == done.rollout_id
    ((shown, _),) = await FailureBoard(broker).read()
    assert (shown.where, shown.reason) == ("rollout", done.reason)


async def test_no_more_samples_are_taken_than_fit(bench: Bench):
    gate = asyncio.Event()
    policy = bench.gated_policy(gate)
    async with bench.server(policy, rollout={"max_concurrent": 2}):
        await bench.submit(*(task(bench, sample_index=i) for i in range(5)))
        await until(lambda: policy.num_in_flight == 2)
        assert await bench.num_pending() == 2  # the others are still anybody's
        gate.set()
        done = await bench.trajectories(5)
    assert len(done) == 5
