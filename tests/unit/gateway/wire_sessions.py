"""Sessions that the tests of wires ask over a real port, and which wires have what a test is about.

A test says with `on` which wires have its feature: the table of docs/any-agent.md says the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from agent_r1.gateway.session import SessionRules
from agent_r1.gateway.wire import Session
from agent_r1.text.chat_format import ChatFormat
from tests.support.fakes import call_text
from tests.unit.gateway.scripted import Client, open_client
from tests.unit.gateway.wire_clients import (
    WIRES,
    Wire,
)
from tests.unit.gateway.wire_fakes import KEY, FakeSession, served, without_port

SEARCH = "<think>look</think>" + call_text(query="Ada")
ALL = tuple(WIRES)
HAVE: dict[str, tuple[str, ...]] = {}
"""Wires that have what a test is about, by the test's name."""


def on(*names: str) -> Callable[[Any], Any]:
    """Mark a test as that of a feature which these wires have."""

    def mark(test: Any) -> Any:
        HAVE[test.__name__] = names
        return pytest.mark.parametrize("kind", [WIRES[name] for name in names], ids=names)(test)

    return mark


@dataclass
class Opened:
    """A session of a scripted policy, and a client of a wire that asks it."""

    client: Client
    wire: Wire
    trajectory: Any = None
    """What came of it, once the server has ended: only then is everything delivered."""

    def asked(self) -> str:
        """What the policy read before its last turn."""
        turn = self.client.session.forest.turns[-1]
        return self.client.chat.decode(turn.context())


@contextlib.asynccontextmanager
async def opened(
    kind: type[Wire],
    chat: ChatFormat,
    *turns: str,
    sequences: int | None = 1,
    rules: SessionRules | None = None,
) -> AsyncIterator[Opened]:
    """Serve a session, and check in the end what its histories have become.

    Args:
        kind: of the client.
        chat: the model's template.
        turns: what the policy writes.
        sequences: of tokens, of one lineage, that are expected; None: whatever they are.
        rules: of the session.
    """
    rules = rules or SessionRules(run_seed=5, max_context=100_000)
    client = await open_client(chat, min(chat._end_of_turn_ids), *turns, rules=rules)
    session: Any = client.session
    async with faked(kind, session) as wire:
        one = Opened(client, wire)
        yield one
    one.trajectory = client.trajectory()
    if sequences is not None:
        assert len(list(one.trajectory.segment_bounds())) == sequences
        assert one.trajectory.lineages == []


@contextlib.asynccontextmanager
async def faked(kind: type[Wire], session: FakeSession) -> AsyncIterator[Wire]:
    """Serve a session, and open a client of it."""
    async with served(session) as (url, _):
        wire = kind(url)
        async with wire.sdk:
            yield wire


def reasons(kind: type[Wire]) -> dict[str, str]:
    """How a wire says why an answer ended."""
    return {
        "chat": {"stop": "stop", "calls": "tool_calls", "length": "length"},
        "responses": {"stop": "completed", "calls": "completed", "length": "incomplete"},
        "messages": {"stop": "end_turn", "calls": "tool_use", "length": "max_tokens"},
    }[kind.name]


async def post(
    kind: type[Wire], session: Session | FakeSession, body: Any = None, **how: Any
) -> httpx.Response:
    how.setdefault("headers", {"authorization": f"Bearer {KEY}"})
    if body is not None:
        how["json"] = body
    async with without_port(session) as client:  # type: ignore[arg-type]
        return await client.post(kind.path, **how)
