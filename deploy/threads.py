"""Blocking work beside an event loop, without holding up the end of the process.

`agent-r1 evaluate` runs its blocking client here while the supervisor watches the services.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that may be abandoned.

    `asyncio.to_thread` would make the process wait for the work after Ctrl-C, or after the services
    it needs have died; a daemon thread ends with the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        try:
            value = work()
        except Exception as exc:  # noqa: BLE001 - handed to whoever waits
            outcome: tuple[T | None, BaseException | None] = (None, exc)
        else:
            outcome = (value, None)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True, name="client").start()
    return await future
