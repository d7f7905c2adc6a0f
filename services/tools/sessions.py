"""Sessions of one tool process: which rollouts opened one, and when each was last used.

Reads `POST /open`, `/fork`, `/close` and calls from `app.py`; calls `Tool.open`, `fork` and
`close`. A session without calls expires, so a rollout that died without closing leaks nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from pydantic import JsonValue

from agent_r1.tools.base import Tool

logger = logging.getLogger(__name__)


class SessionNotOpenError(Exception):
    """A call of a rollout that has no open session here."""


@dataclass
class _Session:
    last_used: float
    calls_in_flight: int = 0
    is_open: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class Sessions:
    """The open sessions of one tool; one without calls for `expiry_s` is closed."""

    tool: Tool
    expiry_s: float
    clock: Callable[[], float] = time.monotonic
    _sessions: dict[str, _Session] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._sessions)

    async def open(self, rollout_id: str, tool_context: JsonValue) -> None:
        """Open a session; a repeated request for an open one changes nothing."""
        async with self._opening(rollout_id) as is_new:
            if is_new:
                await self.tool.open(rollout_id, tool_context)

    async def fork(self, rollout_id: str, fork_id: str) -> None:
        """Open a session in the state of another one; a repeated request changes nothing.

        Raises:
            SessionNotOpenError: the other one is not open.
        """
        async with self._opening(fork_id) as is_new:
            if is_new:
                with self.use(rollout_id):
                    await self.tool.fork(rollout_id, fork_id)

    @asynccontextmanager
    async def _opening(self, rollout_id: str) -> AsyncIterator[bool]:
        """Let the tool open a session, unless it is open: yields whether it is new."""
        session = self._sessions.setdefault(rollout_id, _Session(last_used=self.clock()))
        async with session.lock:
            try:
                yield not session.is_open
            except BaseException:
                self._sessions.pop(rollout_id, None)
                raise
            session.is_open = True
            session.last_used = self.clock()

    async def close(self, rollout_id: str) -> None:
        """Close a session; a request for one that is not open changes nothing.

        A failing `Tool.close` is logged: the caller has no use for the session any more.
        """
        session = self._sessions.pop(rollout_id, None)
        if session is None:
            return
        async with session.lock:
            if not session.is_open:
                return
            session.is_open = False
            try:
                await self.tool.close(rollout_id)
            except Exception:
                logger.exception(
                    "session close failed tool=%s rollout_id=%s", self.tool.name, rollout_id
                )

    @contextmanager
    def use(self, rollout_id: str) -> Iterator[None]:
        """Keep a session alive while one of its calls runs.

        Raises:
            SessionNotOpenError: the rollout has no open session.
        """
        session = self._sessions.get(rollout_id)
        if session is None or not session.is_open:
            raise SessionNotOpenError(
                f"rollout {rollout_id!r} has no open session here: it was never opened at this "
                f"instance, was closed, or had no call for {self.expiry_s:g} s; POST /open first "
                "or raise session_expiry_s"
            )
        session.calls_in_flight += 1
        try:
            yield
        finally:
            session.calls_in_flight -= 1
            session.last_used = self.clock()

    async def close_expired(self) -> list[str]:
        """Close the sessions without calls for `expiry_s`; return their rollout ids."""
        now = self.clock()
        expired = [
            rollout_id
            for rollout_id, session in self._sessions.items()
            if session.is_open
            and session.calls_in_flight == 0
            and now - session.last_used >= self.expiry_s
        ]
        for rollout_id in expired:
            logger.warning("session expired rollout_id=%s expiry_s=%g", rollout_id, self.expiry_s)
            await self.close(rollout_id)
        return expired

    async def close_all(self) -> None:
        """Close every session (shutdown)."""
        for rollout_id in list(self._sessions):
            await self.close(rollout_id)
