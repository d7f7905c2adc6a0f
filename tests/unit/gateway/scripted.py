"""Sessions over a scripted policy, and the client's side of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_r1.gateway.journal import Journal
from agent_r1.gateway.servers import RequestRefusedError, ServerError
from agent_r1.gateway.session import AgentSession, SessionRules
from agent_r1.gateway.trajectory import Credit, join_compacted, session_trajectory
from agent_r1.gateway.wire import Asked, Begun, Ended, Event, Said
from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.generation import GeneratedPart, GenerateRequest
from agent_r1_proto.registry import RolloutServer
from agent_r1_proto.session_log import SessionTakenError
from agent_r1_proto.tasks import ChatMessage, RolloutTask
from agent_r1_proto.tools import ToolSpec
from agent_r1_proto.trajectory import Trajectory, VersionSpan
from tests.support.builders import rollout_task
from tests.support.fakes import SEARCH_PARAMETERS, call_text

SESSION_ID = "0123456789abcdef01234567"

SEARCH = "<think>look</think>" + call_text(query="Ada")
TOOL = ToolSpec(
    name="search", version="", description="Looks things up.", parameters=dict(SEARCH_PARAMETERS)
)


@dataclass
class MemoryLog:
    """A session's log that is kept in this process; shared by the owners that take it."""

    entries: list[bytes] = field(default_factory=list[bytes])
    owners: list[int] = field(default_factory=lambda: [0])
    owner: int = 0
    gate: asyncio.Event | None = None
    """What an append waits for."""
    failures: list[Exception] = field(default_factory=list[Exception])
    """What the next appends raise."""
    waiting: int = 0
    """Appends that wait."""

    def successor(self) -> MemoryLog:
        return MemoryLog(self.entries, self.owners)

    async def take(self) -> list[bytes]:
        self.owners[0] += 1
        self.owner = self.owners[0]
        return list(self.entries)

    async def append(self, entries: Sequence[bytes]) -> None:
        if self.gate is not None:
            self.waiting += 1
            await self.gate.wait()
        if self.owner != self.owners[0]:
            raise SessionTakenError("the session was taken over by another gateway")
        if self.failures:
            raise self.failures.pop(0)
        self.entries += entries

    async def delete(self) -> None:
        self.entries.clear()


@dataclass
class ScriptedServers:
    """Rollout servers that sample from a script, one token a part.

    A turn is what the script has next; token i of it has log-probability -(i + 1) / 100.
    """

    turns: list[list[int]]
    end_id: int
    breaks_after: list[int] = field(default_factory=list[int])
    """Tokens after which the next answers break off; -1 lets one end."""
    refusal: str = ""
    """Why the engine takes no prompt; "" where it does."""
    requests: list[GenerateRequest] = field(default_factory=list[GenerateRequest])
    version: int = 0
    moves: int = 0
    gate: asyncio.Event | None = None
    """Holds the sampling back after the first token of each answer."""
    together: bool = False
    """An answer comes as one part."""
    _unfinished: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def choose(self, preferred: str | None = None) -> RolloutServer:
        return RolloutServer(
            server_id="one", url="http://one", policy_version=0, pid=1, host="h", started_at=0.0
        )

    async def stream(
        self, server: RolloutServer, request: GenerateRequest
    ) -> AsyncGenerator[GeneratedPart]:
        parts = self._stream(request)
        if self.together:
            yield GeneratedPart.joined([part async for part in parts])
            return
        async for part in parts:
            yield part

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[GeneratedPart]:
        self.requests.append(request)
        if self.refusal:
            raise RequestRefusedError(self.refusal)
        name = request.request_id.rpartition("/")[0]
        if name not in self._unfinished:
            turn = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
            self._unfinished[name] = list(turn)
            self._begun = getattr(self, "_begun", {}) | {name: len(turn)}
        turn = self._unfinished[name]
        stop_at = self.breaks_after.pop(0) if self.breaks_after else -1
        for count in range(request.max_tokens):
            if count == stop_at:
                raise ServerError("one stopped in the middle of an answer")
            if count == 1 and self.gate is not None:
                await self.gate.wait()
            i = self._begun[name] - len(turn)
            token = turn.pop(0)
            reason = "stop" if not turn else "length" if count + 1 == request.max_tokens else None
            yield GeneratedPart(
                token_ids=[token],
                logprobs=[-(i + 1) / 100],
                version_spans=[VersionSpan(policy_version=self.version, start=i, end=i + 1)],
                finish_reason=reason,
            )
            if reason is not None:
                return


@dataclass
class Told:
    """What a client was told in answer to one request, by choice."""

    messages: dict[int, ChatMessage]
    texts: dict[int, str]
    reasons: dict[int, str]
    turns: dict[int, int]

    @property
    def message(self) -> ChatMessage:
        return self.messages[0]


@dataclass
class Client:
    """A client of one session that keeps its own history, as agents do."""

    chat: ChatFormat
    servers: ScriptedServers
    session: AgentSession
    log: MemoryLog

    async def ask(self, *messages: ChatMessage, deliver: bool = True, **more: Any) -> Told:
        asked = Asked(messages=messages, **more)
        texts: dict[int, str] = {}
        reasons: dict[int, str] = {}
        turns: dict[int, int] = {}
        async for event in self.session.ask(asked):
            _note(event, texts, reasons, turns)
        messages_of: dict[int, ChatMessage] = {}
        for choice, number in turns.items():
            said = self.session.forest.turns[number].said
            assert said is not None
            messages_of[choice] = said
            if deliver:
                await self.session.delivered(number)
            self.session.release(number)
        return Told(messages_of, texts, reasons, turns)

    async def successor(self, rules: SessionRules | None = None) -> Client:
        """The same session at another gateway."""
        log = self.log.successor()
        session = AgentSession(
            self.session.rollout,
            SESSION_ID,
            Journal(log),  # type: ignore[arg-type]
            self.chat,
            self.servers,  # type: ignore[arg-type]
            rules or SessionRules(run_seed=5),
        )
        await session.open()
        return Client(self.chat, self.servers, session, log)

    def trajectory(self, **changes: Any) -> Trajectory:
        facts: dict[str, Any] = {
            "credit": Credit(),
            "ended": ("COMPLETED", "answer"),
            "answer": None,
            "data": None,
            "seed": 0,
        }
        join_compacted(self.session, self.chat)
        return session_trajectory(self.session, self.chat, **(facts | changes))


def _note(
    event: Event, texts: dict[int, str], reasons: dict[int, str], turns: dict[int, int]
) -> None:
    if isinstance(event, Begun):
        turns[event.choice], texts[event.choice] = event.turn, ""
    elif isinstance(event, Said):
        texts[event.choice] += event.text
    elif isinstance(event, Ended):
        reasons[event.choice] = event.reason


async def open_client(
    chat: ChatFormat,
    end_id: int,
    *turns: str | list[int],
    rollout: RolloutTask | None = None,
    rules: SessionRules | None = None,
) -> Client:
    """A client of a new session whose policy writes `turns`, the last one again and again."""
    script = [[*chat.encode(t), end_id] if isinstance(t, str) else list(t) for t in turns]
    servers = ScriptedServers(script, end_id)
    log = MemoryLog()
    session = AgentSession(
        rollout or rollout_task(),
        SESSION_ID,
        Journal(log),  # type: ignore[arg-type]
        chat,
        servers,  # type: ignore[arg-type]
        rules or SessionRules(run_seed=5),
    )
    await session.open()
    return Client(chat, servers, session, log)


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def system(text: str) -> ChatMessage:
    return ChatMessage(role="system", content=text)


def result(told: ChatMessage, text: str, call: int = 0) -> ChatMessage:
    """The result of a call of a message."""
    return ChatMessage(role="tool", content=text, tool_call_id=told.tool_calls[call].id)


def captured(client: Client, trajectory: Trajectory) -> None:
    """Every token that was sampled is in the trajectory once, behind what it was sampled after."""
    sampled = [t for turn in client.session.forest.turns for t in turn.token_ids]
    assert sorted(trajectory.token_ids[trajectory.action_mask].tolist()) == sorted(sampled)
    contexts = {tuple(turn.context()): turn for turn in client.session.forest.turns}
    for start, end in trajectory.segment_bounds():
        for turn in trajectory.turns:
            if start <= turn.start < end:
                before = tuple(trajectory.token_ids[start : turn.start].tolist())
                written = contexts[before].parent is not None or contexts[before].begins
                assert written
