"""Sessions: opened once, closed once, expired when nobody calls."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import JsonValue

from agent_r1.tools.base import Arguments, CallContext, Tool
from agent_r1.tools.sessions import SessionNotOpenError, Sessions


class Recorder(Tool):
    name = "recorder"
    description = "Records."
    parameters = {"type": "object"}
    sessions = True

    def __init__(self) -> None:
        self.events: list[str] = []
        self.fail_on: str = ""

    async def call(self, arguments: Arguments, context: CallContext) -> str:
        return ""

    async def open(self, rollout_id: str, tool_context: JsonValue) -> None:
        await asyncio.sleep(0)
        self.events.append(f"open {rollout_id} {tool_context}")
        if self.fail_on == "open":
            raise OSError("no room")

    async def fork(self, rollout_id: str, fork_id: str) -> None:
        await asyncio.sleep(0)
        self.events.append(f"fork {rollout_id} {fork_id}")

    async def close(self, rollout_id: str) -> None:
        self.events.append(f"close {rollout_id}")
        if self.fail_on == "close":
            raise OSError("gone")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def tool() -> Recorder:
    return Recorder()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(tool: Recorder, clock: Clock) -> Sessions:
    return Sessions(tool, expiry_s=10.0, clock=clock)


async def test_repeated_and_simultaneous_opens_reach_the_tool_once(table: Sessions, tool: Recorder):
    await asyncio.gather(table.open("a", 1), table.open("a", 1))
    await table.open("a", 1)
    assert tool.events == ["open a 1"]
    assert len(table) == 1


async def test_close_reaches_the_tool_once_and_unknown_ids_are_closed_already(
    table: Sessions, tool: Recorder
):
    await table.open("a", None)
    await table.close("a")
    await table.close("a")
    await table.close("never opened")
    assert tool.events == ["open a None", "close a"]


async def test_a_failed_open_leaves_no_session(table: Sessions, tool: Recorder):
    tool.fail_on = "open"
    with pytest.raises(OSError, match="no room"):
        await table.open("a", None)
    assert len(table) == 0
    with pytest.raises(SessionNotOpenError), table.use("a"):
        pass


async def test_a_failed_close_ends_the_session_and_is_logged(
    table: Sessions, tool: Recorder, caplog: pytest.LogCaptureFixture
):
    tool.fail_on = "close"
    await table.open("a", None)
    await table.close("a")
    assert len(table) == 0
    assert "session close failed tool=recorder rollout_id=a" in caplog.text
    assert "OSError: gone" in caplog.text


async def test_only_sessions_without_calls_for_the_whole_time_expire(
    table: Sessions, tool: Recorder, clock: Clock
):
    await table.open("idle", None)
    await table.open("used", None)
    await table.open("busy", None)
    with table.use("busy"):
        clock.now += 6.0
        with table.use("used"):
            pass
        clock.now += 4.0  # idle: 10 s without a call, used: 4 s, busy: in a call
        assert await table.close_expired() == ["idle"]
    assert len(table) == 2
    assert tool.events[-1] == "close idle"
    with pytest.raises(SessionNotOpenError, match="no call for 10 s"), table.use("idle"):
        pass


async def test_close_all_closes_what_is_open(table: Sessions, tool: Recorder):
    await table.open("a", None)
    await table.open("b", None)
    await table.close_all()
    assert tool.events[-2:] == ["close a", "close b"]
    assert len(table) == 0


async def test_a_fork_is_a_session_of_its_own_and_is_made_once(table: Sessions, tool: Recorder):
    await table.open("a", 1)
    await asyncio.gather(table.fork("a", "b"), table.fork("a", "b"))
    await table.close("a")
    with table.use("b"):
        pass
    await table.close_all()
    assert tool.events == ["open a 1", "fork a b", "close a", "close b"]


async def test_a_fork_of_a_session_that_is_not_open_leaves_none(table: Sessions, tool: Recorder):
    with pytest.raises(SessionNotOpenError):
        await table.fork("gone", "b")
    assert len(table) == 0
    assert tool.events == []
