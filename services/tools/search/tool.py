"""The search tool: finds passages of a corpus for a query.

Reads calls from `app.py`, asks a backend (`backend.py`) through `batching.py`, writes the passages
as one text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from pydantic import JsonValue

from agent_r1.tools.base import Arguments, CallContext, Tool, ToolUnavailableError, error_result
from agent_r1.tools.search.backend import Found, Hit, SearchBackend
from agent_r1.tools.search.batching import BatchedSearch
from agent_r1.tools.search.config import SearchConfig
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tools import ToolResult

_CUT_MARK = "…"


class SearchTool(Tool):
    """Answers a query with the best passages as text; `data` lists their ids and scores.

    Queries that come together are searched together, so they may travel together.
    """

    max_batch = 64
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to search for."}},
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, name: str, config: SearchConfig, backend: SearchBackend) -> None:
        self.name = name
        self.description = config.description
        self.top_k = config.top_k
        self.version = f"1+{backend.fingerprint[:12]}"
        self._config = config
        self._backend = backend
        embedded = config.backend == "bm25"
        self._batched = BatchedSearch(
            backend.search,
            max_batch=config.max_search_batch,
            max_running=config.search_threads if embedded else config.max_search_requests,
            gather_s=0.0 if embedded else config.gather_ms / 1000,
            cache_size=config.cache_size,
        )

    async def start(self) -> None:
        """Start the backend.

        Raises:
            ValueError: its index cannot be used; the text says what to do.
        """
        await self._backend.start()

    async def stop(self) -> None:
        """End the searches that run and close the backend."""
        await self._batched.close()
        await self._backend.close()

    def counters(self) -> Mapping[str, int]:
        """Return what became of the queries so far: the fields of `SearchCounts`."""
        return asdict(self._batched.counts)

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult:
        """Search for `arguments["query"]`."""
        query = arguments["query"]
        assert isinstance(query, str)  # the schema says so
        limit = self._config.max_query_chars
        if not query.strip():
            return error_result("Error: the query is empty; write what to search for.")
        if len(query) > limit:
            return error_result(
                f"Error: the query has {len(query)} characters; the limit is {limit}. "
                "Ask something shorter."
            )
        found = await self.find(query, self.top_k, context.timeout_s)
        mark: dict[str, JsonValue] = {} if found.partial is None else {"partial": found.partial}
        return ToolResult(
            parts=[TextPart(text=self._as_text(found.hits))],
            data=[
                {"id": hit.passage.id, "title": hit.passage.title, "score": hit.score, **mark}
                for hit in found.hits
            ],
        )

    async def find(self, query: str, top_k: int, timeout_s: float) -> Found:
        """Return the best passages of one query.

        Raises:
            ToolUnavailableError: the backend failed, or the part of it that answered has nothing.
        """
        try:
            found = await self._batched.find(query, top_k, timeout_s)
            if found.partial is not None and not found.hits:
                # "No passage matches" would be an answer nobody has looked up.
                raise ToolUnavailableError(f"nothing was found, and {found.partial}")
            return found
        except ToolUnavailableError:
            raise
        except Exception as exc:
            raise ToolUnavailableError(
                f"search backend {self._config.backend!r} failed: {type(exc).__name__}: {exc}"
            ) from exc

    def _as_text(self, hits: Sequence[Hit]) -> str:
        if not hits:
            return self._config.empty_text
        text = self._config.separator.join(
            self._config.passage_template.format(
                number=number,
                id=hit.passage.id,
                title=hit.passage.title,
                text=hit.passage.text,
                score=hit.score,
            )
            for number, hit in enumerate(hits, start=1)
        )
        limit = self._config.max_chars
        if limit is not None and len(text) > limit:
            text = text[: limit - len(_CUT_MARK)].rstrip() + _CUT_MARK
        return text


def open_search_tool(name: str, config: SearchConfig) -> SearchTool:
    """Open the configured backend (building its index if needed) and return the tool.

    Raises:
        ValueError: the corpus, the index folder or the Elasticsearch index cannot be used.
    """
    return SearchTool(name, config, open_backend(config))


def open_backend(config: SearchConfig) -> SearchBackend:
    """Open what finds the passages; tools without a search need none of its packages."""
    if config.backend == "elasticsearch":
        from agent_r1.tools.search.elasticsearch_bm25 import open_index
        from agent_r1.tools.search.elasticsearch_client import ElasticsearchServer

        assert config.elasticsearch_url is not None  # both checked by SearchConfig
        assert config.index is not None
        server = ElasticsearchServer.from_environment(
            os.environ,
            url=config.elasticsearch_url,
            ca_certs=config.ca_certs,
            verify_certs=config.verify_certs,
            request_timeout_s=config.request_timeout_s,
        )
        return open_index(server, config.index)
    from agent_r1.tools.search import tantivy_bm25

    assert config.corpus is not None  # checked by SearchConfig
    index = tantivy_bm25.open_index(config.corpus, config.index_dir)
    return tantivy_bm25.ThreadedBackend(index, config.search_threads)
