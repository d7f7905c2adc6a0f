"""Ending a run in order: a signal or a failed background task reaches the loop at its next wait.

Nothing is cancelled in the middle of a learner step, so that a checkpoint can be written at any
stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

CANCEL_AGAIN_S = 0.2

T = TypeVar("T")


class StopRequested(Exception):  # noqa: N818 - a request, not an error
    """The run was asked to stop (SIGTERM, SIGINT)."""


async def cancel_and_wait(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended; what they raise stays with them."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        # More than once: `asyncio.wait_for` of Python 3.11 loses a cancellation that meets the end
        # of what it waits for, and clients use it inside.
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


class StopSignal:
    """Races the loop's waits against a stop; owns the background tasks."""

    def __init__(self) -> None:
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._background: set[asyncio.Task[Any]] = set()

    def request_stop(self, why: str) -> None:
        """End the run in order at its next wait."""
        if not self._stopped.done():
            logger.info("stopping, a checkpoint is written first reason=%s", why)
            self._stopped.set_exception(StopRequested(why))

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run a background task; its failure ends the run."""
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        # Asked for in any case: asyncio prints an error that nobody asked for, after the reason.
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._stopped.done():
            self._stopped.set_exception(error)

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`; on a stop, cancel it and raise what stopped the run.

        Raises:
            StopRequested: the run was asked to stop.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait({task})
        if self._stopped.done() and (task.cancelled() or not task.exception()):
            # The stop comes first, unless the work has failed with a reason of its own.
            await self._stopped
        return task.result()

    async def close(self) -> None:
        """Cancel the background tasks and wait for them; may be called twice."""
        await cancel_and_wait(set(self._background))
        if not self._stopped.done():
            self._stopped.cancel()
        elif not self._stopped.cancelled():
            self._stopped.exception()  # what ended the run has been raised; asyncio need not warn
