"""`POST /retrieve` of a search tool's service, as Search-R1 retrieval servers answer it.

Reads queries, asks the tool's index, writes the passages with their ids and scores.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import FastAPI, Request, Response
from pydantic import Field, JsonValue

from agent_r1.runtime.http.api import Route, describe, json_response, parse_body
from agent_r1.tools.search.backend import Hit
from agent_r1.tools.search.tool import SearchTool
from agent_r1_proto.messages import Message, StrictMessage

RETRIEVE_TIMEOUT_S = 60.0
"""Longest wait of `POST /retrieve`, whose requests carry no deadline."""


class RetrieveRequest(StrictMessage):
    """Body of `POST /retrieve`, the interface of Search-R1 retrieval servers (arXiv:2503.09516)."""

    queries: Annotated[list[str], Field(fail_fast=True)]
    """Their trainer sends the queries of a whole batch at once, none when nobody searches."""
    topk: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Passages per query; None and 0 are the tool's `top_k`."""
    return_scores: bool = False
    """True: {"document", "score"} per passage; False: the documents alone."""


class RetrieveReply(Message):
    """Answer of `POST /retrieve`."""

    result: list[list[dict[str, JsonValue]]]
    """Per query the passages, the best first: a document {"id", "contents"}, or with scores
    {"document", "score"}."""


RETRIEVE = Route(
    "/retrieve", "post", RetrieveRequest, RetrieveReply, {"503": "What finds the passages is down."}
)


def add_retrieve(app: FastAPI, tool: SearchTool) -> None:
    """Add the route `POST /retrieve` to the application of a search tool.

    The contents of a document are the quoted title, a newline and the text.
    """

    @app.post(RETRIEVE.path)
    async def retrieve(request: Request) -> Response:
        body = parse_body(RetrieveRequest, await request.body())
        top_k = body.topk or tool.top_k
        found = await asyncio.gather(
            *(tool.find(query, top_k, RETRIEVE_TIMEOUT_S) for query in body.queries)
        )
        documents = [[_as_document(hit, body.return_scores) for hit in one.hits] for one in found]
        return json_response(RetrieveReply(result=documents))

    describe(app, (RETRIEVE,))


def _as_document(hit: Hit, with_score: bool) -> dict[str, JsonValue]:
    document: dict[str, JsonValue] = {
        "id": hit.passage.id,
        "contents": f'"{hit.passage.title}"\n{hit.passage.text}',
    }
    return {"document": document, "score": hit.score} if with_score else document
