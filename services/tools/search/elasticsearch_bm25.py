"""Search on Elasticsearch: batches of queries from `batching.py`, one `_msearch` request each.

The index behind the configured name is looked up once, when the tool is opened. A service keeps to
that version of it, so its answers, its cache and the tool's version agree; the next version is
taken up by the next service that starts.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import elastic_transport
import elasticsearch
from elasticsearch import AsyncElasticsearch

from agent_r1.tools.base import ToolUnavailableError
from agent_r1.tools.search.backend import Found, Hit
from agent_r1.tools.search.corpus import Passage
from agent_r1.tools.search.elasticsearch_client import (
    ElasticsearchServer,
    check_server,
    explain,
    reason_in,
)
from agent_r1.tools.search.elasticsearch_index import StoredIndex, check_index

logger = logging.getLogger(__name__)

RETRIED_STATUSES = frozenset({429, 502, 503, 504})
"""Overloaded, or its shards are just moving: the same query may succeed in a moment."""
MAX_RECONNECTS = 2
"""A connection that breaks is opened again so often; a server that is down is said to be down."""
BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0

# Nothing else of the answer is read.
_FILTER_PATH = [
    "responses.status",
    "responses.error",
    "responses.timed_out",
    "responses._shards",
    "responses.hits.hits._id",
    "responses.hits.hits._score",
    "responses.hits.hits._source",
]


@dataclass
class ElasticsearchIndex:
    """A BM25 index on an Elasticsearch server.

    A query is an OR of its analyzed words: any text is allowed, nothing in it is syntax.
    """

    server: ElasticsearchServer
    name: str
    """Name of the index, as it is configured."""
    index: StoredIndex
    """The version that is searched, as `check_index` found it."""
    _client: AsyncElasticsearch | None = field(default=None, init=False)

    @property
    def fingerprint(self) -> str:
        """Hash of the corpus contents and of the analysis settings."""
        assert self.index.meta is not None
        return self.index.meta.fingerprint

    async def start(self) -> None:
        """Check that the index is still there and create the client.

        Raises:
            ValueError: the index cannot be searched; the text says what to do.
        """
        await asyncio.to_thread(_checked, self.server, self.index.name)
        # Retries are ours: they must end with the callers' deadline.
        self._client = self.server.async_client(max_retries=0, retry_on_timeout=False)
        logger.info("search index opened index=%s name=%s", self.index.name, self.name)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    async def search(
        self, queries: Sequence[str], top_k: int, time_left_s: Callable[[], float]
    ) -> list[Found | Exception]:
        """Search; what the server refuses for the moment is asked again while time is left.

        Raises:
            ToolUnavailableError: the server is down or does not answer in time.
        """
        answers: list[Found | Exception] = [ToolUnavailableError("not asked")] * len(queries)
        open_ = list(range(len(queries)))
        reconnects = 0
        for attempt in itertools.count():
            again: list[int] = []
            try:
                responses = await self._msearch([queries[i] for i in open_], top_k, time_left_s())
            except (elasticsearch.ApiError, elastic_transport.TransportError) as exc:
                failure = ToolUnavailableError(explain(exc, self.server))
                failure.__cause__ = exc
                reconnects += isinstance(exc, elastic_transport.ConnectionError)
                if not _is_passing(exc) or reconnects > MAX_RECONNECTS:
                    raise failure from exc
                again = open_
                for i in open_:
                    answers[i] = failure
            else:
                for i, response in zip(open_, responses, strict=True):
                    answers[i] = self._as_found(response)
                    if response.get("status") in RETRIED_STATUSES:
                        again.append(i)
            if not again:
                return answers
            wait_s = min(BACKOFF_S * 2**attempt, MAX_BACKOFF_S) * random.uniform(0.5, 1.5)
            if wait_s >= time_left_s():
                return answers
            logger.info("search is asked again num_queries=%d wait_s=%.3f", len(again), wait_s)
            await asyncio.sleep(wait_s)
            open_ = again
        raise AssertionError("unreachable")

    async def _msearch(
        self, queries: Sequence[str], top_k: int, time_left_s: float
    ) -> list[dict[str, Any]]:
        assert self._client is not None, "ElasticsearchIndex.start was not called"
        timeout_s = max(min(self.server.request_timeout_s, time_left_s), 0.001)
        header: dict[str, Any] = {}
        if self.index.num_shards > 1:
            header["search_type"] = "dfs_query_then_fetch"  # scores as if it were one shard
        searches: list[dict[str, Any]] = []
        for query in queries:
            body = {
                "query": {"match": {"contents": {"query": query}}},
                "size": top_k,
                "track_total_hits": False,
                "_source": ["title", "text"],
            }
            searches += [header, body]
        answer = await self._client.options(request_timeout=timeout_s).msearch(
            index=self.index.name, searches=searches, filter_path=_FILTER_PATH
        )
        responses = answer.get("responses", [])
        if len(responses) != len(queries):
            raise elastic_transport.SerializationError(
                f"{len(responses)} answers for {len(queries)} queries"
            )
        return responses

    def _as_found(self, response: dict[str, Any]) -> Found | Exception:
        error = response.get("error")
        if error is not None:
            reason = reason_in(error)
            if response.get("status") == 404:
                return ToolUnavailableError(
                    f"index {self.index.name!r} is gone from {self.server.url} ({reason}); "
                    f"restart the service to use the index that {self.name!r} is now"
                )
            return ToolUnavailableError(
                f"{self.server.url} answers {response.get('status')} to a query: {reason}"
            )
        hits = [_as_hit(hit) for hit in response.get("hits", {}).get("hits", [])]
        return Found(hits, missing_part(response))


def open_index(server: ElasticsearchServer, name: str) -> ElasticsearchIndex:
    """Find and check the index behind a name or alias.

    Raises:
        ValueError: server or index cannot be used; the text says what to do.
    """
    return ElasticsearchIndex(server, name, _checked(server, name))


def _checked(server: ElasticsearchServer, name: str) -> StoredIndex:
    with server.client() as client:
        check_server(client, server)
        return check_index(client, server, name)


def _as_hit(hit: dict[str, Any]) -> Hit:
    source = hit["_source"]
    passage = Passage(id=hit["_id"], title=source["title"], text=source["text"])
    return Hit(passage, float(hit["_score"]))


def missing_part(response: dict[str, Any]) -> str | None:
    shards = response.get("_shards", {})
    failed = shards.get("failed", 0)
    if failed:
        failures = shards.get("failures") or [{}]
        reason = reason_in(failures[0].get("reason", "no reason given"))
        return f"{failed} of {shards.get('total')} shards did not answer ({reason})"
    if response.get("timed_out"):
        return "the search ended early (timed_out)"
    return None


def _is_passing(exc: Exception) -> bool:
    if isinstance(exc, elasticsearch.ApiError):
        return exc.status_code in RETRIED_STATUSES
    if isinstance(exc, elastic_transport.TlsError):
        return False
    return isinstance(exc, elastic_transport.ConnectionError | elastic_transport.ConnectionTimeout)
