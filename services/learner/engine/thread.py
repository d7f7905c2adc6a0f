"""The engine's own thread: train.py --function--> one worker thread --> PolicyEngine.

The engine blocks and is not thread-safe. One thread runs its calls in order, so that the event
loop keeps collecting, issuing again and evaluating meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from agent_r1.learner.engine.interface import PolicyEngine

T = TypeVar("T")


class EngineThread:
    """Runs calls on the engine one at a time, off the event loop; use as `with`."""

    def __init__(self, engine: PolicyEngine) -> None:
        self._engine = engine
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")

    async def call(self, function: Callable[[PolicyEngine], T]) -> T:
        """Run `function(engine)` in the thread.

        A call that has started always runs to its end, also when the waiting task is cancelled.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, function, self._engine)

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for the call in progress and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
