"""The search tool: finds passages of a corpus for a query.

Reads calls from `app.py`, asks a backend (`backends/`) through `batching.py`, writes the passages
as one text. The same index also answers `POST /retrieve`, as Search-R1 retrieval servers do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from agent_r1.tools.app import json_response, parse_body
from agent_r1.tools.backends import BACKENDS, Hit, SearchBackend
from agent_r1.tools.base import Arguments, CallContext, Tool, ToolUnavailableError, error_result
from agent_r1.tools.batching import BatchedSearch
from agent_r1.tools.config import ToolTable
from agent_r1_proto.messages import StrictMessage
from agent_r1_proto.tools import TextPart, ToolResult

_CUT_MARK = "…"


class SearchTool(Tool):
    """Answers a query with the best passages as text; `data` lists their ids and scores.

    Args:
        name: what the model writes to call it.
        table: its settings.
        backend: finds the passages.
    """

    def __init__(self, name: str, table: ToolTable, backend: SearchBackend) -> None:
        self.name = name
        self.description = table.description
        self.version = f"1+{backend.fingerprint[:12]}"
        self.parameters = {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to search for."}},
            "required": ["query"],
            "additionalProperties": False,
        }
        self._table = table
        self._backend = backend
        self._batched: BatchedSearch | None = None

    async def start(self) -> None:
        """Start the search threads."""
        self._batched = BatchedSearch(
            self._backend.search,
            max_batch=self._table.max_search_batch,
            threads=self._table.search_threads,
            cache_size=self._table.cache_size,
        )

    async def stop(self) -> None:
        """Stop the search threads and close the backend."""
        if self._batched is not None:
            await asyncio.to_thread(self._batched.close)
        self._backend.close()

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult:
        """Search for `arguments["query"]`."""
        query = arguments["query"]
        assert isinstance(query, str)  # the schema says so
        limit = self._table.max_query_chars
        if not query.strip():
            return error_result("Error: the query is empty; write what to search for.")
        if len(query) > limit:
            return error_result(
                f"Error: the query has {len(query)} characters; the limit is {limit}. "
                "Ask something shorter."
            )
        hits = await self.hits(query, self._table.top_k)
        return ToolResult(
            parts=[TextPart(text=self._as_text(hits))],
            data=[
                {"id": hit.passage.id, "title": hit.passage.title, "score": hit.score}
                for hit in hits
            ],
        )

    async def hits(self, query: str, top_k: int) -> list[Hit]:
        """Return the best passages of one query.

        Raises:
            ToolUnavailableError: the backend failed.
        """
        assert self._batched is not None, "SearchTool.start was not called"
        try:
            return await self._batched.hits(query, top_k)
        except Exception as exc:
            raise ToolUnavailableError(
                f"search backend {self._table.backend!r} failed: {type(exc).__name__}: {exc}"
            ) from exc

    def _as_text(self, hits: Sequence[Hit]) -> str:
        if not hits:
            return self._table.empty_text
        text = self._table.separator.join(
            self._table.passage_template.format(
                number=number,
                id=hit.passage.id,
                title=hit.passage.title,
                text=hit.passage.text,
                score=hit.score,
            )
            for number, hit in enumerate(hits, start=1)
        )
        limit = self._table.max_chars
        if limit is not None and len(text) > limit:
            text = text[: limit - len(_CUT_MARK)].rstrip() + _CUT_MARK
        return text


def open_search_tool(name: str, table: ToolTable) -> SearchTool:
    """Open the configured backend (building its index if needed) and return the tool.

    Raises:
        ValueError: the corpus or the index folder cannot be used.
    """
    return SearchTool(name, table, BACKENDS[table.backend](table))


class RetrieveRequest(StrictMessage):
    """Body of `POST /retrieve`, the interface of Search-R1 retrieval servers (arXiv:2503.09516)."""

    queries: Annotated[list[str], Field(min_length=1, max_length=512)]
    topk: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Passages per query; None is the tool's `top_k`."""
    return_scores: bool = False
    """True: {"document", "score"} per passage; False: the documents alone."""


def retrieve_router(tool: SearchTool, default_top_k: int) -> APIRouter:
    """Return the route `POST /retrieve`: {"result": per query a list of passages}.

    A document is {"id", "contents"}, its contents the quoted title, a newline and the text.
    """
    router = APIRouter()

    @router.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        body = parse_body(RetrieveRequest, await request.body())
        top_k = body.topk if body.topk is not None else default_top_k
        found = await asyncio.gather(*(tool.hits(query, top_k) for query in body.queries))
        return json_response(
            {"result": [[_as_document(hit, body.return_scores) for hit in hits] for hits in found]}
        )

    return router


def _as_document(hit: Hit, with_score: bool) -> dict[str, Any]:
    document = {"id": hit.passage.id, "contents": f'"{hit.passage.title}"\n{hit.passage.text}'}
    return {"document": document, "score": hit.score} if with_score else document
