"""Transactions that many tasks ask for at the same time go to Redis in one MULTI.

`RedisConnection.transact` --commands--> `SharedCommits` --one MULTI--> Redis

Hundreds of trajectories may end together. One transaction at a time travels; whatever is asked for
meanwhile waits for its answer and goes next, all of it together. So a lone transaction waits for
nothing, and a crowd shares its round trips.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError

MOST_TOGETHER = 64
"""Transactions in one MULTI; Redis answers nobody else while it runs."""

Fill = Callable[[Any], object]
"""Puts the commands of one transaction on a pipeline."""


class SharedCommits:
    """The transactions of one connection that are waiting for their turn."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._waiting: list[tuple[Fill, asyncio.Future[list[Any] | None]]] = []
        self._travelling: asyncio.Task[None] | None = None

    async def join(self, fill: Fill) -> list[Any] | None:
        """Commit with whoever asks at the same time.

        Returns:
            the answers to the commands of `fill`; None when the transaction that it was part of
            failed or may have failed, for whatever reason.
        """
        outcome: asyncio.Future[list[Any] | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((fill, outcome))
        if self._travelling is None:
            self._travelling = asyncio.create_task(self._travel())
        return await outcome

    async def _travel(self) -> None:
        """Commit until nobody waits."""
        try:
            while self._waiting:
                together = self._waiting[:MOST_TOGETHER]
                del self._waiting[:MOST_TOGETHER]
                # A caller that was cancelled while it waited wants nothing any more.
                await self._commit([one for one in together if not one[1].done()])
        finally:
            self._travelling = None
            for _, outcome in self._waiting:
                if not outcome.done():
                    outcome.set_result(None)

    async def _commit(self, together: list[tuple[Fill, asyncio.Future[list[Any] | None]]]) -> None:
        answers: list[list[Any] | None] = [None] * len(together)
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                ends: list[int] = []
                for fill, _ in together:
                    fill(pipe)
                    ends.append(len(pipe))
                replies = await pipe.execute()
            starts = [0, *ends[:-1]]
            answers = [replies[start:end] for start, end in zip(starts, ends, strict=True)]
        except (RedisError, OSError):
            pass  # each of them tries on its own, and learns whose fault it was
        finally:
            for (_, outcome), answer in zip(together, answers, strict=True):
                if not outcome.done():
                    outcome.set_result(answer)
