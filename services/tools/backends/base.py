"""The protocol between the search tool and what finds its passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_r1.tools.corpus import Passage


@dataclass(frozen=True)
class Hit:
    """A passage that matched."""

    passage: Passage
    score: float
    """Relevance, higher is better; comparable within one query only."""


class SearchBackend(Protocol):
    """Finds passages. Methods block and are called from several threads at once."""

    @property
    def fingerprint(self) -> str:
        """Name of the corpus contents and the settings: equal ones give equal answers."""
        ...

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Find at most `top_k` passages per query, best first; no text is a syntax error.

        Raises:
            Exception: the backend is down; the search tool reports an outage.
        """
        ...

    def close(self) -> None:
        """Release files and connections."""
        ...
