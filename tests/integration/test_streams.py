"""Delivery over a real Redis: every promise of streams.py, kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from agent_r1_proto.dead_letters import MAX_LETTERS
from agent_r1_proto.failures import MAX_KINDS, OTHER_KINDS, FailureBoard
from agent_r1_proto.messages import StreamMessage, encode_entry
from agent_r1_proto.registry import Registry, RolloutServer
from agent_r1_proto.stream_consumer import LONGEST_BLOCK_S, Entry, StreamConsumer
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.trajectory import Trajectory
from agent_r1_proto.weights import NewestVersion
from tests.conftest import RedisServer
from tests.support.builders import rollout_task, trajectory

pytestmark = pytest.mark.redis
REPOSITORY = Path(__file__).resolve().parent.parent.parent
LEASE_S = 0.6
WAIT_S = 20.0


@pytest.fixture
async def broker(redis_url: str, run_id: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url, run_id, lease_s=LEASE_S) as connected:
        yield connected


def tasks_consumer(broker: Broker, name: str) -> StreamConsumer[RolloutTask]:
    return broker.consumer(broker.keys.tasks, RolloutTask, group="rollout", consumer=name)


async def taken_and_held(
    consumer: StreamConsumer[RolloutTask], count: int
) -> list[Entry[RolloutTask]]:
    """Let a consumer take entries, and stop as a process does that hangs or is killed."""
    taken: list[Entry[RolloutTask]] = []
    with contextlib.suppress(RuntimeError):
        async with consumer:
            taken += await consumer.read(count, 1.0)
            raise RuntimeError
    return taken


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await condition():  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.02)


@contextlib.contextmanager
def worker(broker_url: str, run_id: str, name: str, mode: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.support.stream_worker"]
    process = subprocess.Popen(
        [*command, broker_url, run_id, name, mode],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


async def test_finish_publishes_acknowledges_and_deletes(broker: Broker):
    await broker.publish(broker.keys.tasks, rollout_task())
    assert await broker.pending(broker.keys.tasks, "rollout") == 0  # no consumer has come yet
    async with tasks_consumer(broker, "a") as consumer:
        [entry] = await consumer.read(8, 1.0)
        assert await broker.pending(broker.keys.tasks, "rollout") == 1
        await consumer.finish(entry, [(broker.keys.trajectories, trajectory(entry.message))])
        assert await broker.depth(broker.keys.tasks) == 0
        assert await broker.pending(broker.keys.tasks, "rollout") == 0
    results = broker.consumer(broker.keys.trajectories, Trajectory, group="reward", consumer="r")
    async with results:
        [result] = await results.read(8, 1.0)
    assert result.message.rollout_id == str(rollout_task().key)


async def test_an_empty_stream_gives_nothing_when_the_time_is_over(broker: Broker):
    async with tasks_consumer(broker, "a") as consumer:
        assert await consumer.read(1, 0.05) == []


async def test_two_consumers_share_the_entries(broker: Broker):
    tasks = [rollout_task(sample_index=index) for index in range(6)]
    await broker.publish_many(broker.keys.tasks, tasks)
    async with tasks_consumer(broker, "a") as first, tasks_consumer(broker, "b") as second:
        taken = [*await first.read(3, 1.0), *await second.read(3, 1.0)]
    assert sorted(entry.message.key.sample_index for entry in taken) == list(range(6))


async def test_entries_of_a_worker_killed_in_the_middle_go_to_another(
    redis_url: str, broker: Broker, run_id: str
):
    with worker(redis_url, run_id, "doomed", "hold") as doomed:
        await broker.publish(broker.keys.tasks, rollout_task())
        assert doomed.stdout is not None
        held = await asyncio.to_thread(doomed.stdout.readline)
        assert held.strip() == str(rollout_task().key)
        doomed.kill()  # SIGKILL: no clean-up runs
    async with tasks_consumer(broker, "heir") as heir:
        [entry] = await heir.read(1, WAIT_S)
        assert entry.message == rollout_task()


async def test_a_living_worker_keeps_its_entries_beyond_the_lease(broker: Broker):
    await broker.publish(broker.keys.tasks, rollout_task())
    async with tasks_consumer(broker, "slow") as slow, tasks_consumer(broker, "thief") as thief:
        [entry] = await slow.read(1, 1.0)
        assert await thief.read(1, 3 * LEASE_S) == []
        await slow.finish(entry)


async def test_a_zombie_does_not_steal_back_but_may_publish_late(broker: Broker):
    await broker.publish(broker.keys.tasks, rollout_task())
    zombie = tasks_consumer(broker, "zombie")
    [stale] = await taken_and_held(zombie, 1)
    # Its renewal has stopped, as in a process that hangs; the entry goes to another consumer.
    async with tasks_consumer(broker, "heir") as heir:
        [taken] = await heir.read(1, WAIT_S)
        assert zombie.num_in_flight == 1
        async with zombie:  # it wakes up and renews leases again
            deadline = time.monotonic() + LEASE_S  # a renewal that steals would have stolen by then
            while time.monotonic() < deadline:  # all the time: the heir would steal it back
                rows = await broker.redis.xpending_range(broker.keys.tasks, "rollout", "-", "+", 10)
                assert [row["consumer"] for row in rows] == [b"heir"]
                await asyncio.sleep(LEASE_S / 50)
            record = trajectory(stale.message)
            await zombie.finish(stale, [(broker.keys.trajectories, record)])
        await heir.finish(taken, [(broker.keys.trajectories, trajectory(taken.message))])
    # Both results travel on; the learner's group slot takes the first and counts the second.
    assert await broker.depth(broker.keys.trajectories) == 2
    assert await broker.depth(broker.keys.tasks) == 0


async def test_own_pending_entries_come_first_after_a_restart(broker: Broker):
    await broker.publish_many(
        broker.keys.tasks, [rollout_task(sample_index=0), rollout_task(sample_index=1)]
    )
    async with tasks_consumer(broker, "same-name") as before:
        await before.read(1, 1.0)
    async with tasks_consumer(broker, "same-name") as after:
        [first] = await after.read(1, 1.0)
        [second] = await after.read(1, 1.0)
    assert [first.message.key.sample_index, second.message.key.sample_index] == [0, 1]


async def test_a_released_entry_is_taken_at_once(redis_url: str, run_id: str):
    async with await Broker.connect(redis_url, run_id, lease_s=3600.0) as broker:
        await broker.publish(broker.keys.tasks, rollout_task())
        async with tasks_consumer(broker, "a") as first:
            [entry] = await first.read(1, 1.0)
            await first.release(entry)
        async with tasks_consumer(broker, "b") as second:
            assert len(await second.read(1, WAIT_S)) == 1


async def test_garbage_is_dead_lettered_with_a_reason_and_can_be_shown(broker: Broker):
    fields = dict(encode_entry(rollout_task())) | {b"meta": b"{"}
    await broker.redis.xadd(broker.keys.tasks, fields)
    async with tasks_consumer(broker, "a") as consumer:
        assert await consumer.read(1, 0.1) == []
    [letter] = await broker.dead_letters()
    assert letter.stream == broker.keys.tasks
    assert "does not parse" in letter.reason
    assert letter.fields == fields
    assert await broker.depth(broker.keys.tasks) == 0


async def test_an_entry_that_fails_too_often_is_dead_lettered_and_can_be_retried(broker: Broker):
    await broker.publish(broker.keys.tasks, rollout_task())
    async with tasks_consumer(broker, "a") as consumer:
        outcomes = []
        for _ in range(broker.max_processing_failures):
            [entry] = await consumer.read(1, WAIT_S)
            outcomes.append(await consumer.fail(entry, "boom"))
        assert outcomes == [False, False, True]
        [letter] = await broker.dead_letters()
        assert "failed 3 times: boom" in letter.reason
        await broker.retry_dead_letter(letter)
        [again] = await consumer.read(1, WAIT_S)
        assert again.message == rollout_task()
    assert await broker.dead_letters() == []


async def test_whoever_waits_gets_a_result_with_the_dead_letter(broker: Broker):
    await broker.publish(broker.keys.tasks, rollout_task())
    failed = trajectory(rollout_task(), status="FAILED", reason="rollout_error: boom")
    async with tasks_consumer(broker, "a") as consumer:
        for count in range(1, broker.max_processing_failures + 1):
            [entry] = await consumer.read(1, WAIT_S)
            await consumer.fail(entry, "boom", [(broker.keys.trajectories, failed)])
            # Only the last failure is final; before it, nobody may be told that there is none.
            final = count == broker.max_processing_failures
            assert await broker.depth(broker.keys.trajectories) == int(final)
    assert len(await broker.dead_letters()) == 1


async def test_a_read_that_redis_breaks_off_is_made_again(broker: Broker):
    """As Redis 7.0 does when the stream is deleted."""
    redis = broker.redis
    async with tasks_consumer(broker, "a") as consumer:
        reading = asyncio.create_task(consumer.read(1, WAIT_S))

        async def broken_off() -> bool:
            clients = [one for one in await redis.client_list() if one["cmd"] == "xreadgroup"]
            answers = [await redis.client_unblock(int(one["id"]), error=True) for one in clients]
            return any(answers)

        await until(broken_off)
        await broker.publish(broker.keys.tasks, rollout_task())
        [entry] = await reading
        await consumer.finish(entry)


async def test_the_last_consumer_takes_a_stream_without_entries_along(broker: Broker):
    tasks = broker.keys.tasks
    async with tasks_consumer(broker, "stays") as stays:
        async with tasks_consumer(broker, "leaves") as leaves:
            await broker.publish(tasks, rollout_task())
            await leaves.finish((await leaves.read(1, 0.0))[0])
            await stays.read(1, 0.0)
        assert await broker.redis.exists(tasks)  # another one reads it
        await broker.publish(tasks, rollout_task())
        await stays.read(1, 0.0)
    assert await broker.redis.exists(tasks)  # it has an entry
    async with tasks_consumer(broker, "heir") as heir:
        await until(lambda: _takes_and_finishes(heir))
    assert not await broker.redis.exists(tasks)


async def _takes_and_finishes(consumer: StreamConsumer[RolloutTask]) -> bool:
    entries = await consumer.read(1, 0.0)
    await consumer.finish_many(entries)
    return bool(entries)


async def test_dead_letters_are_bounded_in_number_and_size(broker: Broker):
    large = dict(encode_entry(rollout_task())) | {b"meta": b"x" * 5_000_000}
    async with tasks_consumer(broker, "a") as consumer:
        await broker.redis.xadd(broker.keys.tasks, large)
        assert await consumer.read(1, 0.0) == []
        [letter] = await broker.dead_letters()
        assert letter.cut
        assert letter.size_bytes > 5_000_000
        assert letter.fields[b"key"] == large[b"key"]
        assert await broker.redis.memory_usage(broker.keys.dead_letters) < 50_000
        with pytest.raises(ValueError, match=r"only the beginning was kept"):
            await broker.retry_dead_letter(letter)
        for number in range(MAX_LETTERS):
            await broker.redis.xadd(broker.keys.tasks, {b"nonsense": str(number).encode()})
        while await broker.depth(broker.keys.tasks):
            await consumer.read(64, 0.0)
    letters = await broker.dead_letters()
    # One more than fits: the oldest is gone, and all are counted.
    assert len(letters) == MAX_LETTERS
    assert letters[0].fields == {b"nonsense": b"0"}
    assert await broker.dead_letter_count() == MAX_LETTERS + 1


async def test_the_board_tells_what_is_new_since_the_reader_came(broker: Broker):
    rollout, reader = FailureBoard(broker), FailureBoard(broker)
    await rollout.note("rollout", "old news", "r/0")
    await reader.start()
    assert await reader.read() == []
    await rollout.note("reward", "reward_error: component 7 returned nan\n  File r.py", "r/1")
    await rollout.note("reward", "reward_error: component 8 returned nan", "r/2")
    await rollout.note("rollout", "old news", "r/3")
    news = {one.kind: (one.where, one.reason, one.rollout_id, n) for one, n in await reader.read()}
    nan = "reward_error: component # returned nan"
    assert news == {
        nan: ("reward", "reward_error: component 7 returned nan\n  File r.py", "r/1", 2),
        "old news": ("rollout", "old news", "r/0", 1),
    }
    assert await reader.read() == []


async def test_the_board_holds_a_bounded_number_of_kinds(broker: Broker):
    board = FailureBoard(broker)
    for number in range(MAX_KINDS + 10):
        await board.note("rollout", "x" * (number + 1))
    counts = await broker.redis.hgetall(broker.keys.failure_counts)
    assert len(counts) == MAX_KINDS + 1
    assert counts[OTHER_KINDS.encode()] == b"10"


async def test_the_board_begins_anew_in_a_redis_that_lost_it(broker: Broker):
    board, reader = FailureBoard(broker), FailureBoard(broker)
    for _ in range(3):
        await board.note("rollout", "boom")
    assert [count for _, count in await reader.read()] == [3]
    await broker.redis.delete(broker.keys.failure_counts, broker.keys.first_failures)
    await board.note("rollout", "boom")
    assert [count for _, count in await reader.read()] == [1]


async def test_deliveries_alone_never_dead_letter(broker: Broker):
    await broker.publish(broker.keys.tasks, rollout_task())
    async with tasks_consumer(broker, "a") as consumer:
        for _ in range(2 * broker.max_processing_failures):
            [entry] = await consumer.read(1, WAIT_S)
            await consumer.release(entry)
    assert await broker.dead_letters() == []
    assert await broker.depth(broker.keys.tasks) == 1


async def left_by_the_dead(broker: Broker, *tasks: RolloutTask) -> None:
    """Let a consumer take entries and end as a killed process does, its leases over."""
    await broker.publish_many(broker.keys.tasks, tasks)
    ended = tasks_consumer(broker, "ended")
    assert len(await taken_and_held(ended, len(tasks))) == len(tasks)
    await asyncio.sleep(LEASE_S)


async def test_suspects_are_processed_alone(broker: Broker):
    await left_by_the_dead(broker, *(rollout_task(group_id=group) for group in range(3)))
    await broker.publish(broker.keys.tasks, rollout_task(group_id=3))
    async with tasks_consumer(broker, "heir") as heir:
        for group in range(4):
            [entry] = await heir.read(8, WAIT_S)
            assert (entry.message.key.group_id, entry.suspect) == (group, group < 3)
            if entry.suspect:
                assert await heir.read(8, 0.05) == []
            await heir.finish(entry)
    assert await broker.redis.exists(broker.keys.suspects(broker.keys.tasks)) == 0


async def test_a_busy_consumer_finishes_before_it_takes_a_suspect(broker: Broker):
    async with tasks_consumer(broker, "heir") as heir:
        await broker.publish(broker.keys.tasks, rollout_task(group_id=1))
        [busy] = await heir.read(8, WAIT_S)
        await left_by_the_dead(broker, rollout_task(group_id=0))
        await broker.publish(broker.keys.tasks, rollout_task(group_id=2))
        await until(lambda: reads_nothing(heir))
        await heir.finish(busy)
        [suspect] = await heir.read(8, WAIT_S)
        assert (suspect.message.key.group_id, suspect.suspect) == (0, True)
        await heir.finish(suspect)
        [after] = await heir.read(8, WAIT_S)
        assert (after.message.key.group_id, after.suspect) == (2, False)


async def reads_nothing(consumer: StreamConsumer[RolloutTask]) -> bool:
    entries = await consumer.read(8, 0.05)
    for entry in entries:
        await consumer.finish(entry)
    return not entries


async def test_an_entry_that_ends_its_process_twice_alone_is_dead_lettered(
    redis_url: str, run_id: str, broker: Broker
):
    tasks = [rollout_task(group_id=group) for group in range(4)]
    await broker.publish_many(broker.keys.tasks, tasks)
    # Once with the others, then twice alone.
    for number in range(3):
        with worker(redis_url, run_id, f"w{number}", "crash") as process:
            assert await asyncio.to_thread(process.wait, WAIT_S) == 7
    given_up: list[str] = []

    async def give_up(task: RolloutTask, reason: str) -> list[tuple[str, StreamMessage]]:
        given_up.append(f"{task.key}: {reason}")
        return [(broker.keys.trajectories, trajectory(task, status="FAILED", reason=reason))]

    async with tasks_consumer(broker, "last") as last:
        last.on_deadly = give_up
        left: list[int] = []
        async with asyncio.timeout(WAIT_S):
            while await broker.depth(broker.keys.tasks):
                for entry in await last.read(8, 0.2):
                    left.append(entry.message.key.group_id)
                    await last.finish(entry)
    assert left == [1, 2, 3]
    [letter] = await broker.dead_letters()
    assert letter.key == str(tasks[0].key)
    assert letter.reason == (
        "ended 2 processes while nothing else was in flight there, as a crash or a lack of memory "
        "does; the last time in component 'x'"
    )
    assert given_up == [f"{tasks[0].key}: {letter.reason}"]
    assert await broker.depth(broker.keys.trajectories) == 1  # whoever waits for it hears of it
    assert await broker.redis.exists(broker.keys.suspects(broker.keys.tasks)) == 0


async def test_what_is_given_back_never_becomes_a_dead_letter(broker: Broker):
    await left_by_the_dead(broker, rollout_task())
    for number in range(4):  # alone each time, and given back in an orderly end
        async with tasks_consumer(broker, f"drained{number}") as drained:
            [entry] = await drained.read(8, WAIT_S)
            assert entry.suspect
            if number % 2:
                await drained.release(entry)
    assert await broker.dead_letters() == []


async def test_an_orderly_end_makes_no_suspects(broker: Broker):
    await broker.publish_many(
        broker.keys.tasks, [rollout_task(group_id=group) for group in range(3)]
    )
    async with tasks_consumer(broker, "drained") as drained:
        assert len(await drained.read(8, 1.0)) == 3
    async with tasks_consumer(broker, "heir") as heir:
        entries = await heir.read(8, WAIT_S)
    assert [entry.suspect for entry in entries] == [False] * 3


async def test_an_outage_of_redis_makes_no_suspects(broker: Broker):
    """While Redis was away nobody could renew a lease, and nobody has ended."""
    await broker.publish(broker.keys.tasks, rollout_task())
    async with tasks_consumer(broker, "living") as living, tasks_consumer(broker, "other") as other:
        [entry] = await living.read(1, 1.0)
        await broker.redis.xclaim(
            broker.keys.tasks, "rollout", "living", 0, [entry.entry_id], idle=10_000, justid=True
        )
        broker.answers_since = time.monotonic()
        assert await other.read(1, 1.5 * LEASE_S) == []
        await living.finish(entry)


async def test_many_suspects_that_end_well_are_taken_together_later(broker: Broker):
    await left_by_the_dead(broker, *(rollout_task(group_id=group) for group in range(20)))
    sizes: list[int] = []
    async with tasks_consumer(broker, "heir") as heir:
        while sum(sizes) < 20:
            entries = await heir.read(8, WAIT_S)
            sizes.append(len(entries))
            await heir.finish_many(entries)
    # Alone up to 8 that ended well, then a quarter of those.
    assert sizes == [1] * 8 + [2, 2, 3, 3, 2]


async def test_the_next_own_suspect_is_taken_as_soon_as_one_has_ended(redis_url: str, run_id: str):
    async with await Broker.connect(redis_url, run_id, lease_s=60.0) as broker:
        tasks = [rollout_task(group_id=group) for group in range(20)]
        await broker.publish_many(broker.keys.tasks, tasks)
        killed = tasks_consumer(broker, "one")
        with contextlib.suppress(RuntimeError):
            async with killed:
                await killed.read(20, 1.0)
                raise RuntimeError
        heir, started = tasks_consumer(broker, "one"), time.monotonic()
        async with heir, asyncio.TaskGroup() as working:
            for group in range(20):  # looks for more while one is processed, as services do
                [entry] = await heir.read(1, WAIT_S)
                assert (entry.message.key.group_id, entry.suspect) == (group, True)
                working.create_task(heir.finish(entry))
        # A single read that waited for new entries would take this long.
        assert time.monotonic() - started < LONGEST_BLOCK_S


async def test_a_reader_that_keeps_its_name_takes_suspects_before_new_entries(
    redis_url: str, run_id: str
):
    async with await Broker.connect(redis_url, run_id, lease_s=60.0) as broker:
        await broker.publish_many(
            broker.keys.tasks, [rollout_task(group_id=group) for group in range(2)]
        )
        taken: list[list[int]] = []
        for _ in range(3):  # once with the other, then twice alone: no lease has ended
            with contextlib.suppress(RuntimeError):
                async with tasks_consumer(broker, "one") as killed:
                    entries = await killed.read(8, WAIT_S)
                    taken.append([entry.message.key.group_id for entry in entries])
                    await broker.publish(broker.keys.tasks, rollout_task(group_id=len(taken) + 1))
                    raise RuntimeError
        assert taken == [[0, 1], [0], [0]]
        async with tasks_consumer(broker, "one") as heir:
            [other] = await heir.read(8, WAIT_S)
            assert (other.message.key.group_id, other.suspect) == (1, True)
            assert len(await broker.dead_letters()) == 1


async def test_a_newer_major_stays_pending_and_is_reported_once(
    broker: Broker, caplog: pytest.LogCaptureFixture
):
    fields = dict(encode_entry(rollout_task())) | {b"schema": b"rollout_task/3.0"}
    await broker.redis.xadd(broker.keys.tasks, fields)
    with caplog.at_level(logging.ERROR):
        async with tasks_consumer(broker, "a") as consumer:
            for _ in range(3):
                assert await consumer.read(1, LEASE_S) == []
    assert await broker.depth(broker.keys.tasks) == 1
    assert await broker.dead_letters() == []
    assert sum("upgrade this service" in record.message for record in caplog.records) == 1


async def test_an_entry_deleted_while_pending_is_forgotten(broker: Broker):
    await broker.publish(broker.keys.tasks, rollout_task())
    async with tasks_consumer(broker, "a") as first:
        [entry] = await first.read(1, 1.0)
    await broker.redis.xdel(broker.keys.tasks, entry.entry_id)
    async with tasks_consumer(broker, "a") as same, tasks_consumer(broker, "b") as other:
        assert await same.read(1, 0.05) == []
        assert await other.read(1, 2 * LEASE_S) == []
        pending = await broker.redis.xpending(broker.keys.tasks, "rollout")
        assert pending["pending"] == 0


async def test_two_runs_on_one_redis_do_not_meet(redis_url: str, run_id: str):
    first = await Broker.connect(redis_url, run_id + "-1")
    second = await Broker.connect(redis_url, run_id + "-2")
    async with first, second:
        await first.publish(first.keys.tasks, rollout_task("one"))
        await second.publish(second.keys.tasks, rollout_task("two"))
        async with tasks_consumer(first, "a") as of_first, tasks_consumer(second, "a") as of_second:
            [one] = await of_first.read(8, 1.0)
            [two] = await of_second.read(8, 1.0)
        assert (one.message.key.run_id, two.message.key.run_id) == ("one", "two")
        await Registry(first).set_newest_version(NewestVersion(policy_version=9))
        assert await Registry(second).newest_version() is None


async def test_publishing_waits_while_redis_is_away_and_loses_nothing(
    redis_server: RedisServer, run_id: str
):
    async with await Broker.connect(redis_server.url, run_id, lease_s=LEASE_S) as broker:
        async with tasks_consumer(broker, "a") as consumer:
            await broker.publish(broker.keys.tasks, rollout_task(sample_index=0))
            redis_server.kill()
            publishing = asyncio.create_task(
                broker.publish(broker.keys.tasks, rollout_task(sample_index=1))
            )
            reading = asyncio.create_task(consumer.read(8, WAIT_S))
            done, _ = await asyncio.wait({publishing, reading}, timeout=0.5)
            assert not done
            await asyncio.to_thread(redis_server.start)
            await asyncio.wait_for(publishing, WAIT_S)
            entries = await asyncio.wait_for(reading, WAIT_S)
            entries += await consumer.read(8, 0.2)
        indices = {entry.message.key.sample_index for entry in entries}
        assert indices == {0, 1}


async def test_a_redis_that_lost_its_data_gets_its_groups_back(
    redis_server: RedisServer, run_id: str
):
    broker = await Broker.connect(redis_server.url, run_id, lease_s=LEASE_S)
    async with broker, tasks_consumer(broker, "a") as consumer:
        await broker.redis.flushall()
        await broker.publish(broker.keys.tasks, rollout_task())
        assert len(await consumer.read(1, WAIT_S)) == 1


async def test_a_full_redis_pauses_the_publisher_until_there_is_room(
    redis_server: RedisServer, run_id: str, caplog: pytest.LogCaptureFixture
):
    async with await Broker.connect(redis_server.url, run_id) as broker:
        await broker.publish(broker.keys.tasks, rollout_task(sample_index=0))
        async with tasks_consumer(broker, "a") as consumer:
            [entry] = await consumer.read(1, 1.0)
            await broker.redis.config_set("maxmemory", "1")
            finishing = asyncio.create_task(
                consumer.finish(entry, [(broker.keys.trajectories, trajectory(entry.message))])
            )
            done, _ = await asyncio.wait({finishing}, timeout=0.4)
            assert not done
            assert await broker.depth(broker.keys.tasks) == 1  # not half finished
            await broker.redis.config_set("maxmemory", "0")
            await asyncio.wait_for(finishing, WAIT_S)
        assert await broker.depth(broker.keys.trajectories) == 1
        assert await broker.depth(broker.keys.tasks) == 0
    assert "redis is unreachable or full" in caplog.text


async def test_what_makes_room_in_a_full_redis_does_not_wait_for_what_needs_room(
    redis_server: RedisServer, run_id: str
):
    async with await Broker.connect(redis_server.url, run_id) as broker:
        await broker.publish(broker.keys.tasks, rollout_task())
        async with tasks_consumer(broker, "a") as consumer:
            entries = await consumer.read(1, 1.0)
            await broker.redis.config_set("maxmemory", "1")
            publishing = asyncio.create_task(broker.publish(broker.keys.tasks, rollout_task()))
            finishing = asyncio.create_task(consumer.finish_many(entries))
            await asyncio.wait_for(finishing, WAIT_S)
            assert not publishing.done()
            await broker.redis.config_set("maxmemory", "0")
            await asyncio.wait_for(publishing, WAIT_S)


async def commits(broker: Broker) -> int:
    """Return how many MULTIs the server has executed."""
    statistics = await broker.redis.info("commandstats")
    return statistics.get("cmdstat_exec", {"calls": 0})["calls"]


async def test_publishers_at_the_same_time_share_transactions(
    redis_server: RedisServer, run_id: str
):
    async with await Broker.connect(redis_server.url, run_id) as broker:
        before = await commits(broker)
        tasks = [rollout_task(group_id=index) for index in range(128)]
        await asyncio.gather(*(broker.publish(broker.keys.tasks, task) for task in tasks))
        assert await broker.depth(broker.keys.tasks) == 128
        assert await commits(broker) - before == 2  # 64 at a time


async def test_one_transaction_that_fails_fails_no_other(broker: Broker):
    await broker.redis.set(broker.keys.scored, "not a stream")
    names = [broker.keys.tasks, broker.keys.scored, broker.keys.trajectories]
    results = await asyncio.gather(
        *(broker.publish(name, rollout_task()) for name in names), return_exceptions=True
    )
    assert [result is None for result in results] == [True, False, True]
    assert "WRONGTYPE" in str(results[1])
    # They may be there twice: what may not have arrived is sent again.
    assert await broker.depth(broker.keys.tasks) >= 1
    assert await broker.depth(broker.keys.trajectories) >= 1


async def test_a_publisher_cancelled_before_its_turn_publishes_nothing(broker: Broker):
    stays, goes = (
        asyncio.create_task(broker.publish(broker.keys.tasks, rollout_task(group_id=group)))
        for group in (1, 2)
    )
    await asyncio.sleep(0)  # both have asked, and nothing has been sent
    goes.cancel()
    await asyncio.wait({stays, goes})
    async with tasks_consumer(broker, "a") as consumer:
        entries = await consumer.read(8, 0.0)
    assert [entry.message.key.group_id for entry in entries] == [1]


async def test_a_rollout_server_is_known_until_its_announcement_expires(broker: Broker):
    registry = Registry(broker)
    server = RolloutServer(
        server_id="s1", url="http://127.0.0.1:1", policy_version=0, pid=1, host="h", started_at=0.0
    )
    await registry.announce_rollout_server(server, expiry_s=WAIT_S)
    assert await registry.rollout_servers() == [server]
    await registry.announce_rollout_server(server, expiry_s=0.05)

    async def gone() -> bool:
        return await registry.rollout_servers() == []

    await until(gone)


async def test_memory_limit_is_read_from_the_server(redis_server: RedisServer, run_id: str):
    async with await Broker.connect(redis_server.url, run_id) as broker:
        assert (await broker.memory()).limit is None
        await broker.redis.config_set("maxmemory", str(64 * 2**20))
        memory = await broker.memory()
        assert memory.limit == 64 * 2**20
        assert 0 < memory.used < memory.limit


async def test_a_cancelled_operation_ends_its_task_even_when_it_has_just_succeeded(
    broker: Broker,
):
    async def swallow() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "done"

    task = asyncio.create_task(broker.retrying(swallow, "test"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_operations_still_work_while_a_cancelled_task_cleans_up(broker: Broker):
    async def work() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            await broker.publish(broker.keys.tasks, rollout_task())
        return 0

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await broker.depth(broker.keys.tasks) == 1


async def test_hundreds_of_publishers_at_once_share_the_connections(
    broker: Broker, caplog: pytest.LogCaptureFixture
):
    tasks = [rollout_task(group_id=index) for index in range(300)]
    await asyncio.gather(*(broker.publish(broker.keys.tasks, task) for task in tasks))
    assert await broker.depth(broker.keys.tasks) == 300
    assert "redis is unreachable" not in caplog.text


async def test_throughput_of_two_workers_loses_and_doubles_nothing(
    redis_url: str, broker: Broker, run_id: str
):
    tasks = [rollout_task(group_id=index) for index in range(200)]
    await broker.publish_many(broker.keys.tasks, tasks)
    results = broker.consumer(broker.keys.trajectories, Trajectory, group="reward", consumer="r")
    seen: list[int] = []
    with worker(redis_url, run_id, "w1", "echo"), worker(redis_url, run_id, "w2", "echo"):
        async with results:
            deadline = time.monotonic() + WAIT_S
            while len(seen) < len(tasks) and time.monotonic() < deadline:
                entries = await results.read(64, 1.0)
                seen += [entry.message.rollout.key.group_id for entry in entries]
                await results.finish_many(entries)
    assert sorted(seen) == list(range(200))
