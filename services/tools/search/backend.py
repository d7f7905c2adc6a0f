"""The protocol between the search tool and what finds its passages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_r1.tools.search.corpus import Passage


@dataclass(frozen=True)
class Hit:
    """A passage that matched."""

    passage: Passage
    score: float
    """Relevance, higher is better; comparable within one query only."""


@dataclass(frozen=True)
class Found:
    """Passages found for one query."""

    hits: list[Hit]
    """Best first."""
    partial: str | None = None
    """Why a part of the index did not answer; None when all of it did."""


class SearchBackend(Protocol):
    """Finds passages; everything runs on the event loop and must leave it free."""

    @property
    def fingerprint(self) -> str:
        """Name of the corpus contents and the settings: equal ones give equal answers."""
        ...

    async def start(self) -> None:
        """Create clients and threads; called once, before the first search.

        Raises:
            ValueError: the index cannot be used; the text says what to do.
        """
        ...

    async def search(
        self, queries: Sequence[str], top_k: int, time_left_s: Callable[[], float]
    ) -> list[Found | Exception]:
        """Find at most `top_k` passages per query; no text is a syntax error.

        Args:
            queries: what to search for, as `batching.normalize_query` returns it.
            top_k: most passages per query.
            time_left_s: how long somebody still waits for an answer, in seconds.

        Returns:
            One answer per query; an exception stands for a query that failed alone.

        Raises:
            Exception: the backend is down; the search tool reports an outage.
        """
        ...

    async def close(self) -> None:
        """Release files, threads and connections."""
        ...
