"""What finds passages for the search tool: one protocol and the table of its implementations."""

from __future__ import annotations

import os
from collections.abc import Callable

from agent_r1.tools.backends.base import Found, Hit, SearchBackend
from agent_r1.tools.config import ToolTable

__all__ = ["BACKENDS", "Found", "Hit", "SearchBackend"]


def _open_bm25(table: ToolTable) -> SearchBackend:
    # tantivy is an extra of the search tool; user tools run without it.
    from agent_r1.tools.backends.tantivy_bm25 import open_index
    from agent_r1.tools.backends.threads import ThreadedBackend

    assert table.corpus is not None  # checked by ToolTable
    return ThreadedBackend(open_index(table.corpus, table.index_dir), table.search_threads)


def _open_elasticsearch(table: ToolTable) -> SearchBackend:
    from agent_r1.tools.backends.elasticsearch_bm25 import open_index
    from agent_r1.tools.backends.elasticsearch_client import Server

    assert table.elasticsearch_url is not None  # checked by ToolTable
    assert table.index is not None
    server = Server.from_environment(
        os.environ,
        url=table.elasticsearch_url,
        ca_certs=table.ca_certs,
        verify_certs=table.verify_certs,
        request_timeout_s=table.request_timeout_s,
    )
    return open_index(server, table.index)


BACKENDS: dict[str, Callable[[ToolTable], SearchBackend]] = {
    "bm25": _open_bm25,
    "elasticsearch": _open_elasticsearch,
}
