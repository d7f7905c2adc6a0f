"""Between the search tool and its backend: batches, one search per distinct query, a cache.

Reads queries from `tool.py`, hands batches to a backend. A batch is what arrives within a few
milliseconds, or while the backend is busy. The samples of a group ask the same things, so queries
that differ in spelling only are one query, equal queries in flight share one search, and recent
answers are kept.
"""

from __future__ import annotations

import asyncio
import logging
import unicodedata
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agent_r1.tools.search.backend import Found

logger = logging.getLogger(__name__)

SearchFunction = Callable[
    [Sequence[str], int, Callable[[], float]], Awaitable[list[Found | Exception]]
]
_Key = tuple[str, int]  # normalized query, top_k


@dataclass
class SearchCounts:
    """Counts of the queries so far, by what became of them."""

    asked: int = 0
    """Queries of callers."""
    cached: int = 0
    """Answered from the cache."""
    joined: int = 0
    """Shared the search of an equal query in flight."""
    batches: int = 0
    """Requests to the backend."""
    searched: int = 0
    """Queries in those requests."""
    partial: int = 0
    """Answers that lack a part of the index."""


@dataclass
class _Pending:
    future: asyncio.Future[Found]
    expires_at: float  # loop time at which the most patient caller gives up


@dataclass
class BatchedSearch:
    """Gathers queries into batches for a backend."""

    search: SearchFunction
    """(queries, top_k, time left in seconds) -> one answer per query."""
    max_batch: int = 32
    """Most queries per call of `search`."""
    max_running: int = 1
    """Most calls of `search` at once."""
    gather_s: float = 0.0
    """Time for which the first query of a batch waits for others, in seconds."""
    cache_size: int = 4096
    """Answers kept, least recently used dropped first."""
    counts: SearchCounts = field(default_factory=SearchCounts)
    _cache: OrderedDict[_Key, Found] = field(default_factory=OrderedDict, init=False)
    _waiting: deque[_Key] = field(default_factory=deque, init=False)
    _pending: dict[_Key, _Pending] = field(default_factory=dict, init=False)
    _running: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _gathering: asyncio.Handle | None = field(default=None, init=False)

    async def find(self, query: str, top_k: int, timeout_s: float) -> Found:
        """Return what the backend finds for one query; nobody waits longer than `timeout_s`.

        Raises:
            TimeoutError: the query waited for its turn longer than that.
            Exception: what the backend raised for it.
        """
        self.counts.asked += 1
        key = (normalize_query(query), top_k)
        cached = self._cache.get(key)
        if cached is not None:
            self.counts.cached += 1
            self._cache.move_to_end(key)
            return cached
        loop = asyncio.get_running_loop()
        expires_at = loop.time() + timeout_s
        pending = self._pending.get(key)
        if pending is None:
            pending = _Pending(loop.create_future(), expires_at)
            pending.future.add_done_callback(_mark_retrieved)
            self._pending[key] = pending
            self._waiting.append(key)
            self._plan_dispatch()
        else:
            self.counts.joined += 1
            pending.expires_at = max(pending.expires_at, expires_at)
        # Shielded: a caller that gives up must not cancel the others' search.
        return await asyncio.shield(pending.future)

    async def close(self) -> None:
        """End what runs; nobody waits for it any more."""
        if self._gathering is not None:
            self._gathering.cancel()
        self._waiting.clear()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for pending in self._pending.values():
            pending.future.set_exception(ConnectionError("the search is closed"))
        self._pending.clear()

    def _plan_dispatch(self) -> None:
        if len(self._waiting) >= self.max_batch and self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        if self._gathering is None:
            loop = asyncio.get_running_loop()
            if len(self._waiting) >= self.max_batch or self.gather_s == 0:
                # Not at once: calls that arrive in the same tick share the batch.
                self._gathering = loop.call_soon(self._dispatch)
            else:
                self._gathering = loop.call_later(self.gather_s, self._dispatch)

    def _dispatch(self) -> None:
        self._gathering = None
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._running) < self.max_running:
            top_k = self._waiting[0][1]
            batch: list[_Key] = []
            while self._waiting and len(batch) < self.max_batch and self._waiting[0][1] == top_k:
                key = self._waiting.popleft()
                if self._pending[key].expires_at > loop.time():
                    batch.append(key)
                else:
                    waited = TimeoutError("the caller gave up before the query's turn came")
                    self._pending.pop(key).future.set_exception(waited)
            if batch:
                task = loop.create_task(self._run(batch, top_k))
                self._running.add(task)
                task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if self._gathering is None:
            self._dispatch()

    async def _run(self, batch: list[_Key], top_k: int) -> None:
        loop = asyncio.get_running_loop()
        pending = [self._pending[key] for key in batch]

        def time_left_s() -> float:
            return max(one.expires_at for one in pending) - loop.time()

        self.counts.batches += 1
        self.counts.searched += len(batch)
        try:
            answers = await self.search([query for query, _ in batch], top_k, time_left_s)
        except Exception as exc:
            logger.exception("search failed num_queries=%d", len(batch))
            answers = [exc] * len(batch)
        for key, answer in zip(batch, answers, strict=True):
            future = self._pending.pop(key).future
            if isinstance(answer, Exception):
                future.set_exception(answer)
                continue
            future.set_result(answer)
            if answer.partial is None:
                self._remember(key, answer)
            else:
                self.counts.partial += 1
                logger.warning("search answer is partial reason=%s", answer.partial)

    def _remember(self, key: _Key, found: Found) -> None:
        if self.cache_size == 0:
            return
        self._cache[key] = found
        if len(self._cache) > self.cache_size:
            self._cache.popitem(last=False)


def normalize_query(text: str) -> str:
    """Return a query as it is searched: NFC, single spaces, lower case.

    Nothing the analyzers tell apart is lost: they read lower case, and so letter by letter, where
    `str.lower` looks at neighbours (final sigma) or turns one letter into two.
    """
    text = " ".join(unicodedata.normalize("NFC", text).split())
    if text.isascii():
        return text.lower()
    return "".join(low if len(low := char.lower()) == 1 else char for char in text)


def _mark_retrieved(future: asyncio.Future[Found]) -> None:
    # When every caller has given up, nobody else looks at the exception.
    if not future.cancelled():
        future.exception()
