"""The sandboxes of one service: kept started ahead of the calls, replaced after use.

`PythonExec` and `CodeTests` take a worker for each call. A used worker is ended and the next one
starts in the background, so that a call finds an interpreter that has already started.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from agent_r1.sandbox import bubblewrap
from agent_r1.sandbox.interpreter import ask_interpreter
from agent_r1.sandbox.processes import adopt_orphans, hide_from_user
from agent_r1.sandbox.settings import SandboxSettings
from agent_r1.sandbox.worker import SandboxEndedError, SandboxPlan, SandboxStartError, Worker

logger = logging.getLogger(__name__)

PROBE_WALL_S = 20.0
_PROBE = "print(6 * 7)"


class SandboxBusyError(Exception):
    """No sandbox became free in time."""


class SandboxPool:
    """Up to `max_workers` sandboxes."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings
        self._plan: SandboxPlan | None = None
        self._free = asyncio.Semaphore(settings.max_workers)
        self._ready: deque[asyncio.Task[Worker]] = deque()
        self._endings: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def start(self) -> None:
        """Check that a sandbox runs here, and start them all.

        Raises:
            ValueError: it does not; the text says why and what to do.
        """
        self._plan = await find_working_plan(await make_plan(self._settings), _try_plan)
        for _ in range(self._settings.max_workers):
            self._ready.append(asyncio.create_task(self._start_one()))

    async def stop(self) -> None:
        """End every sandbox."""
        self._stopping = True
        for started in await asyncio.gather(*self._ready, return_exceptions=True):
            if isinstance(started, Worker):
                self._end(started)
        self._ready.clear()
        if self._endings:
            await asyncio.wait(self._endings)

    @asynccontextmanager
    async def place(self, wait_s: float) -> AsyncIterator[None]:
        """Wait for one of the `max_workers` places, and keep it for one call.

        Raises:
            SandboxBusyError: none became free in time.
        """
        try:
            # Not wait_for: it swallows a cancellation that comes with a free one.
            async with asyncio.timeout(wait_s):
                await self._free.acquire()
        except TimeoutError as exc:
            raise SandboxBusyError(
                f"all {self._settings.max_workers} sandboxes were busy for {wait_s:.1f} s; raise "
                "max_workers of this tool or start more instances of it"
            ) from exc
        try:
            yield
        finally:
            self._free.release()

    @asynccontextmanager
    async def worker(self, wait_s: float) -> AsyncIterator[Worker]:
        """Lend a worker to a call that has a place; it is ended afterwards, or used again.

        Raises:
            SandboxBusyError: it did not start in time.
            SandboxStartError: a sandbox could not be started.
        """
        worker = await self._take(wait_s)
        worker.begin_call()
        try:
            yield worker
        finally:
            # In the background: an exception of the call, or its end, does not wait for it.
            self._ready.append(asyncio.create_task(self._renew(worker)))

    async def _take(self, wait_s: float) -> Worker:
        starting = self._ready.popleft()
        try:
            async with asyncio.timeout(max(0.0, wait_s)):
                return await asyncio.shield(starting)
        except SandboxStartError:
            self._ready.append(asyncio.create_task(self._start_one()))
            raise
        except TimeoutError as exc:
            self._ready.append(starting)
            raise SandboxBusyError("no sandbox started within the deadline of the call") from exc
        except asyncio.CancelledError:
            self._ready.append(starting)
            raise

    async def _renew(self, worker: Worker) -> Worker:
        """Return the worker if it may be used again, else end it and start another."""
        if worker.reusable and not self._stopping:
            return worker
        await asyncio.shield(self._end(worker))
        return await self._start_one()

    async def _start_one(self) -> Worker:
        if self._stopping or self._plan is None:
            raise SandboxStartError("the tool is not running")
        return await Worker.start(self._plan)

    def _end(self, worker: Worker) -> asyncio.Task[None]:
        task = asyncio.create_task(worker.kill())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task


async def make_plan(settings: SandboxSettings) -> SandboxPlan:
    """Find what a sandbox is made of.

    Raises:
        ValueError: something is not there; the text says what to do.
    """
    own_user = bubblewrap.gives_own_users(container=settings.sandbox == "container")
    bwrap = None
    if settings.sandbox == "bubblewrap":
        bwrap = bubblewrap.find_bwrap(settings.bwrap)
    else:
        logger.warning('sandbox = "container": programs see all that this container holds')
        adopt_orphans()
        if not own_user:
            hide_from_user()
    interpreter = await ask_interpreter(settings.python)
    return SandboxPlan(settings, interpreter, bwrap, own_user=own_user)


async def find_working_plan(
    plan: SandboxPlan, try_plan: Callable[[SandboxPlan], Awaitable[None]]
) -> SandboxPlan:
    """Return a plan by which a sandbox works here: the one given, or without a /proc of its own.

    Raises:
        ValueError: there is none; the text says why and what to do.
    """
    try:
        await try_plan(plan)
    except SandboxStartError as exc:
        if "proc" not in str(exc):
            raise ValueError(str(exc)) from exc
        plan = replace(plan, private_proc=False)
        try:
            await try_plan(plan)
        except SandboxStartError:
            raise ValueError(str(exc)) from exc
        logger.warning("no /proc may be mounted here; the sandboxes have none")
    return plan


async def _try_plan(plan: SandboxPlan) -> None:
    """Start a sandbox, run a program in it, end it.

    Raises:
        SandboxStartError: it does not do what it should.
    """
    worker = await Worker.start(plan)
    try:
        result = await worker.run_program(_PROBE, wall_s=PROBE_WALL_S)
    except SandboxEndedError as exc:
        raise SandboxStartError(f"the sandbox ended while it ran a trivial program: {exc}") from exc
    finally:
        await worker.kill()
    if result.stdout != "42\n":
        raise SandboxStartError(
            f"the sandbox cannot run a trivial program: {result}; check memory_mb, processes and "
            "preload"
        )
