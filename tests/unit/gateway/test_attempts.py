"""Attempts beside their sessions: tools of the run, and what a handover leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_r1.attempts.tool_client import ToolOutageError, ToolReply
from agent_r1.gateway.attempts import AgentAttempts, session_name
from agent_r1.gateway.config import AgentConfig
from agent_r1.gateway.journal import Journal
from agent_r1.gateway.session import AgentSession, SessionRules
from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.agents import AGENTS
from agent_r1_proto.tools import ToolResult, ToolSpec
from tests.support.builders import rollout_task
from tests.support.learner_fakes import eventually
from tests.unit.gateway.scripted import Client, MemoryLog, open_client

NOTES = ToolSpec(name="notes", version="1", description="Keeps.", parameters={}, sessions=True)


class FakeTools:
    """A tool client of one tool, whose every session is at an instance of its own."""

    def __init__(self) -> None:
        self.specs = {NOTES.name: NOTES}
        self.opened = 0
        self.asked: list[str] = []
        """Instances that were called, in order."""
        self.is_away = False
        self.answers = asyncio.Event()
        self.answers.set()

    def argument_error(self, spec: ToolSpec, arguments: Any) -> str | None:
        return None

    async def open_session(self, name: str, session_id: str, context: Any) -> None:
        await asyncio.sleep(0)
        await self.answers.wait()
        self.opened += 1
        if self.is_away:
            raise ToolOutageError("tool_unreachable", "notes", "away", attempts=3)

    def holder(self, name: str, session_id: str) -> str:
        return f"notes-{self.opened}"

    async def call(self, name: str, arguments: Any, **how: Any) -> ToolReply:
        self.asked.append(self.holder(name, ""))
        if name == AGENTS:  # an agent that works on
            await asyncio.Event().wait()
        return ToolReply(ToolResult(), "1", self.asked[-1], 0, 0.0)


def attempts_of(client: Client, tools: Any) -> AgentAttempts:
    unused: Any = None
    return AgentAttempts(
        broker=unused,
        chat=client.chat,
        servers=unused,
        tools=tools,
        agent=AgentConfig(command=["x"]),
        rules=SessionRules(),
        server_id="gateway",
        wire_url="http://gateway",
    )


async def test_parallel_first_calls_share_one_session_with_a_tool(chat: ChatFormat, end_id: int):
    client, tools = await open_client(chat, end_id, "one"), FakeTools()
    attempts = attempts_of(client, tools)
    calls = (attempts.call_tool(client.session, "notes", {"q": i}) for i in range(3))
    await asyncio.gather(*calls)
    assert (tools.opened, tools.asked) == (1, ["notes-1"] * 3)


async def test_calls_that_wait_for_a_tool_that_is_away_fail_together(chat: ChatFormat, end_id: int):
    client, tools = await open_client(chat, end_id, "one"), FakeTools()
    attempts, tools.is_away = attempts_of(client, tools), True
    calls = [attempts.call_tool(client.session, "notes", {"q": i}) for i in range(3)]
    failures: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    assert [one.kind for one in failures] == ["unavailable"] * 3
    assert (tools.opened, tools.asked) == (1, [])
    tools.is_away = False
    await attempts.call_tool(client.session, "notes", {"q": 3})
    assert (tools.opened, tools.asked) == (2, ["notes-2"])


async def test_a_call_that_goes_away_leaves_the_opening_to_the_others(
    chat: ChatFormat, end_id: int
):
    client, tools = await open_client(chat, end_id, "one"), FakeTools()
    attempts = attempts_of(client, tools)
    tools.answers.clear()
    first, second = (
        asyncio.create_task(attempts.call_tool(client.session, "notes", {"q": i})) for i in range(2)
    )
    await eventually(lambda: bool(client.session.opening), second)
    first.cancel()
    tools.answers.set()
    await second
    assert (first.cancelled(), tools.opened, tools.asked) == (True, 1, ["notes-1"])


async def test_a_fault_is_known_to_the_gateway_that_takes_the_attempt(
    chat: ChatFormat, end_id: int, monkeypatch: pytest.MonkeyPatch
):
    client, tools, log = await open_client(chat, end_id, "one"), FakeTools(), MemoryLog()
    attempts, rollout = attempts_of(client, tools), rollout_task()
    opened: Any = log
    monkeypatch.setattr(attempts, "_journal", lambda name: Journal(opened))
    running = asyncio.create_task(attempts.run(rollout))
    await eventually(lambda: tools.asked == ["notes-1"], running)
    attempts._open[session_name(rollout)].note_fault("tool_timeout: search")
    attempts.is_stopping = True
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    journal: Any = Journal(log.successor())  # type: ignore[arg-type]
    heir = AgentSession(rollout, "one", journal, chat, attempts.servers, SessionRules())
    await heir.open()
    assert heir.fault == "tool_timeout: search"
