"""Attempts beside their sessions: tools of the run, and what a handover leaves."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agent_r1.attempts.tool_client import ToolOutageError, ToolReply
from agent_r1.gateway.attempts import AgentAttempts, session_name
from agent_r1.gateway.config import AgentConfig
from agent_r1.gateway.journal import Journal, SessionOpened
from agent_r1.gateway.session import AgentSession, SessionRules
from agent_r1.gateway.wire import WireError
from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.agents import AGENTS, AgentEnd
from agent_r1_proto.tasks import RolloutTask, Task
from agent_r1_proto.tools import ToolResult, ToolSpec
from agent_r1_proto.trajectory import Trajectory
from tests.support.builders import rollout_task
from tests.support.learner_fakes import eventually
from tests.unit.gateway.scripted import SEARCH, TOOL, Client, MemoryLog, open_client, user

NOTES = ToolSpec(name="notes", version="1", description="Keeps.", parameters={}, sessions=True)


class FakeTools:
    """A tool client of one tool, whose every session is at an instance of its own."""

    def __init__(self) -> None:
        self.specs = {NOTES.name: NOTES}
        self.opened = 0
        self.asked: list[str] = []
        """Instances that were called, in order."""
        self.closed: list[str] = []
        """Tools whose sessions were closed."""
        self.resumed: list[tuple[str, str]] = []
        """Tools whose sessions another gateway had opened, with their instances."""
        self.is_away = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.end: asyncio.Future[AgentEnd] = asyncio.get_running_loop().create_future()
        """How the agent ends."""
        self.given: dict[str, Any] = {}
        """What the agent was called with."""

    def argument_error(self, spec: ToolSpec, arguments: Any) -> str | None:
        return None if "q" in arguments else "'q' is missing"

    async def open_session(self, name: str, session_id: str, context: Any) -> None:
        await asyncio.sleep(0)
        await self.answers.wait()
        self.opened += 1
        if self.is_away:
            raise ToolOutageError("tool_unreachable", "notes", "away", attempts=3)

    def resume_session(self, name: str, session_id: str, instance: str) -> None:
        self.resumed.append((name, instance))

    async def close_session(self, name: str, session_id: str) -> None:
        self.closed.append(name)

    def holder(self, name: str, session_id: str) -> str:
        return f"notes-{self.opened}"

    async def call(self, name: str, arguments: Any, **how: Any) -> ToolReply:
        self.asked.append(self.holder(name, ""))
        result = ToolResult()
        if name == AGENTS:
            self.given = how
            result = ToolResult(data=(await self.end).model_dump(mode="json"))
        return ToolReply(result, "1", self.asked[-1], 0, 0.0)


class LoggedAttempts(AgentAttempts):
    """Attempts whose journals are in a log of this process."""

    log: MemoryLog

    def _journal(self, session_id: str) -> Journal:
        return Journal(self.log)  # type: ignore[arg-type]

    async def begin(self, rollout: RolloutTask) -> asyncio.Task[Trajectory]:
        """Make an attempt, whose agent has been called when this returns."""
        tools: Any = self.tools
        running = asyncio.create_task(self.run(rollout))
        await eventually(lambda: bool(tools.given), running)
        return running

    async def hand_over(self, running: asyncio.Task[Trajectory]) -> None:
        """Stop as a gateway does, for another one to go on with an attempt."""
        self.is_stopping = True
        running.cancel()
        await asyncio.wait([running])


def attempts_of(client: Client, tools: Any, log: MemoryLog | None = None) -> LoggedAttempts:
    unused: Any = None
    servers: Any = client.servers
    attempts = LoggedAttempts(
        broker=unused,
        chat=client.chat,
        servers=servers,
        tools=tools,
        agent=AgentConfig(command=["x"], timeout_s=1000.0),
        rules=SessionRules(),
        server_id="gateway",
        wire_url="http://gateway",
    )
    attempts.log = log or MemoryLog()
    return attempts


def opened(started_at: float) -> bytes:
    """The journal's first entry, by a gateway that has gone."""
    return SessionOpened(key="k" * 24, started_at=started_at).model_dump_json().encode()


async def test_parallel_first_calls_share_one_session_with_a_tool(chat: ChatFormat, end_id: int):
    client, tools = await open_client(chat, end_id, "one"), FakeTools()
    attempts = attempts_of(client, tools)
    calls = (attempts.call_tool(client.session, "notes", {"q": i}) for i in range(3))
    await asyncio.gather(*calls)
    await attempts.call_tool(client.session, "notes", {"q": 3})
    assert (tools.opened, tools.asked) == (1, ["notes-1"] * 4)


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


async def test_a_session_with_a_tool_that_opens_too_late_is_closed(chat: ChatFormat, end_id: int):
    client, tools = await open_client(chat, end_id, "one"), FakeTools()
    tools.answers.clear()
    call = asyncio.create_task(
        attempts_of(client, tools).call_tool(client.session, "notes", {"q": 0})
    )
    await eventually(lambda: bool(client.session.opening), call)
    call.cancel()
    client.session.close()
    tools.answers.set()
    await eventually(lambda: tools.closed == ["notes"])


async def test_a_call_that_a_tool_cannot_take_is_told_so_and_costs_it_nothing(
    chat: ChatFormat, end_id: int
):
    client, tools = await open_client(chat, end_id, "one"), FakeTools()
    told = await attempts_of(client, tools).call_tool(client.session, "notes", {})
    assert (told.status, told.text()) == ("error", "Error: 'q' is missing")
    assert (tools.opened, tools.asked) == (0, [])


async def test_a_task_that_names_its_tools_is_offered_no_others(chat: ChatFormat, end_id: int):
    rollout = rollout_task(task=Task(id="one", prompt="Who?", tools=["search"]))
    client, tools = await open_client(chat, end_id, "one", rollout=rollout), FakeTools()
    with pytest.raises(WireError, match="there is no tool 'notes'; offered: none"):
        await attempts_of(client, tools).call_tool(client.session, "notes", {"q": 0})


@pytest.mark.parametrize(
    ("turn", "stop", "answer"),
    [
        ("Ada, I think. ", (), "Ada, I think."),
        ("So <answer>Ada</answer>", (), "Ada"),
        ("So <answer>Ada</answer>", ("</answer>",), "Ada"),  # which the client is not shown
        ("I look. " + SEARCH, (), None),
    ],
)
async def test_what_the_last_turn_says_is_the_answer_unless_it_calls_a_tool(
    chat: ChatFormat, end_id: int, turn: str, stop: tuple[str, ...], answer: str | None
):
    client, log, tools = await open_client(chat, end_id, turn), MemoryLog(), FakeTools()
    attempts, rollout = attempts_of(client, tools, log), rollout_task()
    running = await attempts.begin(rollout)
    session = attempts._open[session_name(rollout)]
    await Client(chat, client.servers, session, log).ask(user("who?"), tools=(TOOL,), stop=stop)
    tools.end.set_result(AgentEnd(exit="ok"))
    assert (await running).turns[-1].answer == answer


async def test_calls_of_tools_count_against_the_limit_of_requests(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "one", rules=SessionRules(max_requests=1))
    tools = FakeTools()
    attempts = attempts_of(client, tools)
    await attempts.call_tool(client.session, "notes", {"q": 0})
    with pytest.raises(WireError, match=r"used its 1 \(agent.max_requests\)"):
        await attempts.call_tool(client.session, "notes", {"q": 1})
    assert tools.asked == ["notes-1"]


async def test_a_fault_is_known_to_the_gateway_that_takes_the_attempt(
    chat: ChatFormat, end_id: int
):
    client, log, rollout = await open_client(chat, end_id, "one"), MemoryLog(), rollout_task()
    attempts = attempts_of(client, FakeTools(), log)
    running = await attempts.begin(rollout)
    attempts._open[session_name(rollout)].note_fault("tool_timeout: search")
    await attempts.hand_over(running)
    journal: Any = Journal(log.successor())  # type: ignore[arg-type]
    heir = AgentSession(rollout, "one", journal, chat, attempts.servers, SessionRules())
    await heir.open()
    assert heir.fault == "tool_timeout: search"


async def test_an_agent_that_fails_after_its_session_moved_is_no_failure_of_its_own(
    chat: ChatFormat, end_id: int
):
    client, log, rollout = await open_client(chat, end_id, "one"), MemoryLog(), rollout_task()
    first = attempts_of(client, FakeTools(), log)
    running = await first.begin(rollout)
    moved = Client(chat, client.servers, first._open[session_name(rollout)], log)
    await moved.ask(user("who?"))
    await first.call_tool(moved.session, "notes", {"q": 0})
    await first.hand_over(running)
    tools: Any = first.tools
    assert tools.closed == []  # its agent runs on
    tools = FakeTools()
    tools.end.set_result(AgentEnd(exit="failed", error="no gateway"))
    trajectory = await attempts_of(client, tools, log.successor()).run(rollout)
    assert trajectory.status == "FAILED"
    assert trajectory.reason.startswith("agent_lost: its session moved to another gateway")
    assert tools.resumed == [(AGENTS, "notes-1"), ("notes", "notes-2")]
    assert tools.closed == [AGENTS, "notes"]


async def test_an_agent_that_another_gateway_has_not_called_fails_by_itself(
    chat: ChatFormat, end_id: int
):
    client, log, tools = await open_client(chat, end_id, "one"), MemoryLog(), FakeTools()
    log.entries.append(opened(time.time()))
    attempts, rollout = attempts_of(client, tools, log), rollout_task()
    running = await attempts.begin(rollout)
    await Client(chat, client.servers, attempts._open[session_name(rollout)], log).ask(user("?"))
    tools.end.set_result(AgentEnd(exit="failed", error="x"))
    assert (await running).reason == "agent_failed: x"


async def test_the_time_of_an_attempt_runs_on_while_it_moves(chat: ChatFormat, end_id: int):
    client, log, tools = await open_client(chat, end_id, "one"), MemoryLog(), FakeTools()
    log.entries.append(opened(time.time() - 600.0))
    attempts = attempts_of(client, tools, log)
    running = await attempts.begin(rollout_task())
    await attempts.hand_over(running)
    # Of 1000 s, 400 are left, and the service has 15 s beside them.
    left_s = tools.given["tool_context"]["timeout_s"], tools.given["timeout_s"]
    assert left_s == pytest.approx((400.0, 415.0), abs=10.0)


async def test_a_gateway_that_lost_a_session_leaves_its_agent_to_the_other(
    chat: ChatFormat, end_id: int
):
    client, log, tools = await open_client(chat, end_id, "one"), MemoryLog(), FakeTools()
    running = await attempts_of(client, tools, log).begin(rollout_task())
    await log.successor().take()
    tools.end.set_result(AgentEnd(exit="ok"))
    with pytest.raises(asyncio.CancelledError):
        await running
    assert tools.closed == []
