"""Searching off the event loop: batches, one search per distinct query, and a cache.

Reads queries from `search.py`, hands batches to a blocking backend in threads. Batches form by
themselves: whatever arrives while the threads are busy goes together. The samples of a group ask
the same things, so equal queries in flight share one search and recent answers are kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from agent_r1.tools.backends.base import Hit

logger = logging.getLogger(__name__)

_Key = tuple[str, int]  # query, top_k


class BatchedSearch:
    """An asynchronous front of a blocking search function.

    Args:
        search: (queries, top_k) -> hits per query; runs in a thread.
        max_batch: most queries per call of `search`.
        threads: most calls of `search` at once.
        cache_size: answers kept, least recently used dropped first.
    """

    def __init__(
        self,
        search: Callable[[Sequence[str], int], list[list[Hit]]],
        *,
        max_batch: int = 32,
        threads: int = 1,
        cache_size: int = 4096,
    ) -> None:
        self._search = search
        self._max_batch = max_batch
        self._threads = threads
        self._cache_size = cache_size
        self._cache: OrderedDict[_Key, list[Hit]] = OrderedDict()
        self._waiting: deque[_Key] = deque()
        self._futures: dict[_Key, asyncio.Future[list[Hit]]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="search")

    async def hits(self, query: str, top_k: int) -> list[Hit]:
        """Return the passages of one query, best first.

        Raises:
            Exception: what `search` raised for the batch the query was in.
        """
        key = (query, top_k)
        cached = self._cache.get(key)
        if cached is not None:
            self._cache.move_to_end(key)
            return cached
        future = self._futures.get(key)
        if future is None:
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            future.add_done_callback(_mark_retrieved)
            self._futures[key] = future
            self._waiting.append(key)
            # Not at once: calls that arrive in the same tick share the batch.
            loop.call_soon(self._dispatch)
        # Shielded: a caller that gives up must not cancel the others' search.
        return await asyncio.shield(future)

    def close(self) -> None:
        """Stop the threads once their current batches are done."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _dispatch(self) -> None:
        while self._waiting and len(self._running) < self._threads:
            top_k = self._waiting[0][1]
            batch: list[_Key] = []
            while self._waiting and len(batch) < self._max_batch and self._waiting[0][1] == top_k:
                batch.append(self._waiting.popleft())
            task = asyncio.get_running_loop().create_task(self._run(batch, top_k))
            self._running.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._dispatch()

    async def _run(self, batch: list[_Key], top_k: int) -> None:
        queries = [query for query, _ in batch]
        try:
            answers = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._search, queries, top_k
            )
        except Exception as exc:
            logger.exception("search failed num_queries=%d", len(batch))
            for key in batch:
                self._futures.pop(key).set_exception(exc)
            return
        for key, hits in zip(batch, answers, strict=True):
            self._futures.pop(key).set_result(hits)
            self._remember(key, hits)

    def _remember(self, key: _Key, hits: list[Hit]) -> None:
        if self._cache_size == 0:
            return
        self._cache[key] = hits
        if len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)


def _mark_retrieved(future: asyncio.Future[list[Hit]]) -> None:
    # When every caller has given up, nobody else looks at the exception.
    if not future.cancelled():
        future.exception()
