"""What finds passages for the search tool: one protocol and the table of its implementations."""

from __future__ import annotations

from collections.abc import Callable

from agent_r1.tools.backends.base import Hit, SearchBackend
from agent_r1.tools.config import ToolTable

__all__ = ["BACKENDS", "Hit", "SearchBackend"]


def _open_bm25(table: ToolTable) -> SearchBackend:
    # tantivy is an extra of the search tool; user tools run without it.
    from agent_r1.tools.backends.tantivy_bm25 import open_index

    assert table.corpus is not None  # checked by ToolTable
    return open_index(table.corpus, table.index_dir)


BACKENDS: dict[str, Callable[[ToolTable], SearchBackend]] = {
    "bm25": _open_bm25,
}
