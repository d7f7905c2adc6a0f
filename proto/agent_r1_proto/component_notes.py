"""Notes of the component that is at work on an entry that may end its process.

services --name--> `begin_component` --> Redis, from where the dead letter of the entry takes it;
stream_consumer.py says for which entries. For all others it does nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar

NOTE: ContextVar[Callable[[str], Awaitable[None]] | None] = ContextVar("component", default=None)
"""Keeps the name of a component; of the asyncio task that works on the entry."""


async def begin_component(name: str) -> None:
    """Say which component begins to work on the entry of this asyncio task."""
    note = NOTE.get()
    if note is not None:
        await note(name)
