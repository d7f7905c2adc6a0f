"""A blocking index behind the asynchronous `SearchBackend`: its searches run in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from agent_r1.tools.search.backend import Found, Hit


class BlockingIndex(Protocol):
    """An index whose `search` blocks, and is called from several threads at once."""

    @property
    def fingerprint(self) -> str:
        """Name of the corpus contents and the settings."""
        ...

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Find at most `top_k` passages per query, best first."""
        ...


class ThreadedBackend:
    """Runs a blocking index in threads of its own."""

    def __init__(self, index: BlockingIndex, threads: int = 1) -> None:
        self._index = index
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="search")

    @property
    def fingerprint(self) -> str:
        """The index's."""
        return self._index.fingerprint

    async def start(self) -> None:
        """Do nothing: threads start with the searches that need them."""

    async def search(
        self, queries: Sequence[str], top_k: int, time_left_s: Callable[[], float]
    ) -> list[Found | Exception]:
        """Search in a thread; a search that has begun is not interrupted."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._executor, self._index.search, queries, top_k)
        return [Found(hits) for hits in found]

    async def close(self) -> None:
        """Wait for the searches that run."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)
