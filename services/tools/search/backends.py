"""What finds passages for the search tool: one protocol and the table of its implementations."""

from __future__ import annotations

import os
from collections.abc import Callable

from agent_r1.tools.config import ToolConfig
from agent_r1.tools.search.backend import Found, Hit, SearchBackend

__all__ = ["BACKENDS", "Found", "Hit", "SearchBackend"]


def _open_bm25(config: ToolConfig) -> SearchBackend:
    # tantivy is an extra of the search tool; user tools run without it.
    from agent_r1.tools.search.tantivy_bm25 import open_index
    from agent_r1.tools.search.threads import ThreadedBackend

    assert config.corpus is not None  # checked by ToolConfig
    return ThreadedBackend(open_index(config.corpus, config.index_dir), config.search_threads)


def _open_elasticsearch(config: ToolConfig) -> SearchBackend:
    from agent_r1.tools.search.elasticsearch_bm25 import open_index
    from agent_r1.tools.search.elasticsearch_client import Server

    assert config.elasticsearch_url is not None  # checked by ToolConfig
    assert config.index is not None
    server = Server.from_environment(
        os.environ,
        url=config.elasticsearch_url,
        ca_certs=config.ca_certs,
        verify_certs=config.verify_certs,
        request_timeout_s=config.request_timeout_s,
    )
    return open_index(server, config.index)


BACKENDS: dict[str, Callable[[ToolConfig], SearchBackend]] = {
    "bm25": _open_bm25,
    "elasticsearch": _open_elasticsearch,
}
