"""The log of a session in a real Redis: its order, its owners, and what a lost answer does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from agent_r1_proto.session_log import SessionLog, SessionTakenError
from agent_r1_proto.streams import Broker

pytestmark = pytest.mark.redis


@pytest.fixture
async def broker(redis_url: str, run_id: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url, run_id) as connection:
        yield connection


async def test_an_heir_reads_everything_and_the_earlier_owner_writes_no_more(broker: Broker):
    first = SessionLog(broker, "s", kept_s=60)
    assert await first.take() == []
    await first.append([b"a", b"b"])
    await first.append([b"c"])
    heir = SessionLog(broker, "s", kept_s=60)
    assert await heir.take() == [b"a", b"b", b"c"]
    with pytest.raises(SessionTakenError):
        await first.append([b"d"])
    await heir.append([b"e"])
    assert await SessionLog(broker, "s", kept_s=60).take() == [b"a", b"b", b"c", b"e"]


async def test_an_append_whose_answer_was_lost_is_written_once(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
):
    log = SessionLog(broker, "s", kept_s=60)
    await log.take()
    run = log._append
    answers: list[int] = []

    async def lose_the_first(**arguments: object) -> int:
        answers.append(await run(**arguments))
        if len(answers) == 1:
            raise ConnectionError("the answer was lost")
        return answers[-1]

    monkeypatch.setattr(log, "_append", lose_the_first)
    await log.append([b"a"])
    await log.append([b"b"])
    assert answers == [1, 1, 1]
    assert await SessionLog(broker, "s", kept_s=60).take() == [b"a", b"b"]


async def test_an_append_that_was_given_up_is_repeated_with_what_came_since(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
):
    log = SessionLog(broker, "s", kept_s=60)
    await log.take()
    run = log._append

    async def lose_the_answer(**arguments: object) -> int:
        await run(**arguments)
        raise asyncio.CancelledError

    monkeypatch.setattr(log, "_append", lose_the_answer)
    with pytest.raises(asyncio.CancelledError):
        await log.append([b"a", b"b"])
    monkeypatch.setattr(log, "_append", run)
    await log.append([b"a", b"b", b"c"])
    await log.append([b"d"])
    heir = SessionLog(broker, "s", kept_s=60)
    assert await heir.take() == [b"a", b"b", b"c", b"d"]
    assert await heir.first() == b"a"


async def test_a_log_expires_with_its_owner_and_is_deleted_whole(broker: Broker):
    log = SessionLog(broker, "s", kept_s=60)
    await log.take()
    await log.append([b"a"])
    for key in broker.keys.session("s"):
        assert 50_000 < await broker.redis.pttl(key) <= 60_000
    await log.delete()
    assert not await broker.redis.exists(*broker.keys.session("s"))
