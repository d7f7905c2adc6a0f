"""A session that says what a test has written down, and the application that serves it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI

from agent_r1.gateway.app import create_wire, error_body
from agent_r1.gateway.wire import Asked, Begun, Ended, Event, Said, Session, WireError
from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http import serving as http
from agent_r1.runtime.http.guard import HttpGuard
from agent_r1.text.reading import TurnReader
from agent_r1_proto.tasks import ChatMessage

WAIT_S = 20.0
KEY = "key-of-this-session"
CALL = '<tool_call>{"name": "search", "arguments": {"q": "東京"}}</tool_call>'
USER_MESSAGE = ChatMessage(role="user", content="Where?")


def turn(*texts: str, choice: int = 0, opening: str = "", reason: Any = "stop") -> list[Event]:
    said = [Said(choice, text, (7 + i,), (-0.5 * i,)) for i, text in enumerate(texts)]
    return [Begun(choice, choice + 3, opening, 10, 4), *said, Ended(choice, reason, len(texts))]


@dataclass
class FakeSession:
    """Says what a test has written down, and notes what it was asked."""

    events: Sequence[Event | Exception] = field(default_factory=lambda: turn("Paris."))
    more: Callable[[], AsyncGenerator[Event]] | None = None
    asked: list[Asked] = field(default_factory=list[Asked])
    delivered_turns: list[int] = field(default_factory=list[int])
    released_turns: list[int] = field(default_factory=list[int])
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    journal_writes: asyncio.Event | None = None
    """What a delivery waits for."""
    delivery_fails: Exception | None = None
    faults: list[str] = field(default_factory=list[str])
    kept: dict[str, ChatMessage] = field(default_factory=dict[str, ChatMessage])
    """Of the dialogue that goes on by the id of an answer: what turns have said, by their ids."""
    model: str = "policy"
    turn_reader: TurnReader = field(default_factory=TurnReader)

    def call_id(self, turn: int, call: int) -> str:
        return f"call_{turn}_{call}"

    async def ask(self, asked: Asked) -> AsyncGenerator[Event]:
        self.asked.append(asked)
        try:
            for event in self.events:
                if isinstance(event, Exception):
                    raise event
                yield event
            if self.more is not None:
                async for event in self.more():
                    yield event
        finally:
            self.closed.set()

    def turn_id(self, turn: int) -> str:
        return f"0123abcd_{turn}"

    def said(self, turn_id: str) -> ChatMessage | None:
        return self.kept.get(turn_id)

    def is_kept(self, turn_id: str) -> bool:
        return turn_id in self.kept

    def dialogue(self, turn_id: str) -> list[tuple[ChatMessage, str]] | None:
        said = self.kept.get(turn_id)
        return None if said is None else [(USER_MESSAGE, ""), (said, turn_id)]

    def count_tokens(self, asked: Asked) -> int:
        self.asked.append(asked)
        return 17

    def release(self, turn: int) -> None:
        self.released_turns.append(turn)

    async def delivered(self, turn: int) -> None:
        if self.journal_writes is not None:
            await self.journal_writes.wait()
        if self.delivery_fails is not None:
            raise self.delivery_fails
        self.delivered_turns.append(turn)

    def note_fault(self, fault: str) -> None:
        self.faults.append(fault)


@dataclass
class FakeSessions:
    session: FakeSession

    async def find(self, session_id: str, key: str) -> Session:
        if (session_id, key) != ("one", KEY):
            raise WireError("no_session", "no session has this id and this key; use those given")
        return self.session


def wire(session: FakeSession) -> FastAPI:
    sessions: Any = FakeSessions(session)
    return create_wire(sessions)


@contextlib.asynccontextmanager
async def served(session: FakeSession) -> AsyncIterator[tuple[str, int]]:
    """Serve sessions as the gateway does; yield the base URL of one, and the port."""
    listen = ListenConfig()
    with contextlib.closing(http.bind_unprotected("wire", listen)) as listener:
        port = listener.getsockname()[1]
        async with http.serving(wire(session), listener, listen, None, error_body):
            yield f"http://127.0.0.1:{port}/sessions/one/v1", port


def without_port(session: FakeSession) -> httpx.AsyncClient:
    """Return a client of the application and its guard, which needs no server."""
    guarded = HttpGuard(wire(session), ListenConfig(), None, error_body=error_body)
    transport = httpx.ASGITransport(guarded)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost/sessions/one/v1/")
