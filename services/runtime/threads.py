"""Blocking work beside an event loop, without holding up the end of the process.

`agent-r1 evaluate` runs its blocking client here while the supervisor watches the services.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that may be abandoned.

    `asyncio.to_thread` would make the process wait for the work after Ctrl-C, or after the services
    it needs have died; a daemon thread ends with the process.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # whoever gives up waiting does not cancel the work

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as exc:  # noqa: BLE001 - handed to whoever waits
            future.set_exception(exc)

    threading.Thread(target=run, daemon=True, name="client").start()
    return await asyncio.wrap_future(future)
