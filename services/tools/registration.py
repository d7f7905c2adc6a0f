"""A tool service's place in the registry: announce, renew, drain, leave.

main.py runs it beside the HTTP server. Rollout servers read the announcements and report which
versions their trajectories keep; an instance that leaves waits until nobody keeps its version, or
another instance serves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agent_r1.tools.app import ToolService
from agent_r1_proto.registry import NOTICE_S, WITHDRAW_TIMEOUT_S, ToolRegistry
from agent_r1_proto.tool_pool import ToolInstance

logger = logging.getLogger(__name__)

RENEWALS = 5
"""Renewals within the life of one announcement."""
LOOK_AGAIN_S = 0.2
ANSWER_TIMEOUT_S = 3.0
"""Longest an instance that leaves waits for Redis to say who uses it."""


@dataclass(eq=False)
class Announcer:
    """Keeps one instance announced, until it has left."""

    registry: ToolRegistry
    """Registry that it announces itself in."""
    service: ToolService
    """The instance's."""
    say: Callable[[str], None]
    """Callback with one line about where the instance is announced, once it is."""

    def __post_init__(self) -> None:
        self._instance = ToolInstance(
            instance=self.service.instance,
            url="",
            spec=self.service.spec,
            capacity=self.service.config.max_calls_in_flight,
            pid=os.getpid(),
            host=socket.gethostname(),
            started_at=time.time(),
        )
        self._changed = asyncio.Event()
        self._leaving = False
        self._left = False
        self.up = asyncio.Event()
        """Event that is set once the instance answers."""
        self.told_to_drain = False
        """An operator has taken the instance out; it may be put back."""

    def announce(self, url: str) -> None:
        """Let `run` begin: the instance answers at `url`."""
        self._instance = self._instance.model_copy(update={"url": url})
        self.up.set()

    async def run(self) -> None:
        """Announce and renew, from when the instance answers until it has left.

        Raises:
            ValueError: another instance of this version has another description or schema.
        """
        config = self.service.config
        await self.up.wait()
        await self._check_version()
        said = False
        while not self._left:
            told = await self.registry.announce(
                self._instance, config.announce_expiry_s, config.new_version
            )
            self._changed.clear()
            if not said:
                said = True
                self.say(await self._describe())
            if told != self.told_to_drain and not self._left:
                what = "told to drain" if told else "told to take calls again"
                logger.info("%s instance=%s", what, self._instance.instance)
                self.told_to_drain = told
                self._mark()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.announce_expiry_s / RENEWALS):
                    await self._changed.wait()

    async def _check_version(self) -> None:
        tool, version = self._instance.tool, self._instance.version
        state = (await self.registry.read([tool]))[tool]
        for other in state.instances:
            if other.version == version and other.spec != self._instance.spec:
                raise ValueError(
                    f"tool {tool!r} version {version!r} is served by {other.instance} ({other.url})"
                    " with another description, schema or session setting; give this one a "
                    f"version of its own (now {version!r}), or another run.tool_pool "
                    f"(now {self.registry.pool!r})"
                )

    def _mark(self) -> None:
        draining = self._leaving or self.told_to_drain
        self._instance = self._instance.model_copy(update={"draining": draining})
        self.service.note_draining(draining)
        self._changed.set()

    async def _describe(self) -> str:
        """Say where the instance is announced and what its version gets of new trajectories."""
        one = self._instance
        share = (await self.registry.read([one.tool]))[one.tool].shares().get(one.version, 0.0)
        return (
            f"tool {one.tool} serves at {one.url}, announced as {one.instance} in the pool "
            f"{self.registry.pool!r}; version {one.version} gets {share:.0%} of new trajectories"
        )

    async def drain(self, timeout_s: float) -> None:
        """Take no new trajectories, serve those that keep this version to their end, withdraw."""
        deadline = time.monotonic() + timeout_s
        self._leaving = True
        self._mark()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if await self._if_redis_answers(self.registry.reports()):
                    await asyncio.sleep(min(NOTICE_S, timeout_s))
                # What others report in Redis has no event to wait for.
                while await self._needed():  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_AGAIN_S)
        await self.service.drain(max(deadline - time.monotonic(), 0))
        self._left = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                await self.registry.withdraw(self._instance.instance)

    async def _if_redis_answers(self, question: Awaitable[object]) -> bool:
        """Return the answer, or False where there is none: the run and its Redis may have ended."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return bool(await question)
        except TimeoutError:
            logger.warning(
                "leaving without knowing who needs this instance: redis is away instance=%s",
                self._instance.instance,
            )
            return False

    async def _needed(self) -> bool:
        if len(self.service.sessions) > 0:
            return True
        return await self._if_redis_answers(self._is_kept())

    async def _is_kept(self) -> bool:
        """Return whether trajectories keep a version that only this instance serves."""
        tool, version = self._instance.tool, self._instance.version
        state = (await self.registry.read([tool]))[tool]
        if any(one.version == version and not one.draining for one in state.instances):
            return False
        return await self.registry.pinned(tool, version) > 0
