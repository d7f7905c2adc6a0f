"""Models that a session offers: one, in the form in which OpenAI's or Anthropic's clients read it.

`GET /sessions/{id}/v1/models` and `/models/NAME`; Anthropic's clients send `anthropic-version`.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from agent_r1.gateway.wire import Sessions
from agent_r1.gateway.wires.http import find_session
from agent_r1.runtime.imports import quick_imports

with quick_imports():
    from anthropic.types import ModelInfo
    from openai.types import Model

_OWNER = "agent-r1"


def add_models(app: FastAPI, sessions: Sessions) -> None:
    """Add the routes to an application."""
    started = int(time.time())

    async def model(request: Request, session_id: str) -> dict[str, Any]:
        name = (await find_session(sessions, request, session_id)).model
        if not is_anthropic(request):
            made = Model(id=name, created=started, object="model", owned_by=_OWNER)
            return made.model_dump()
        created = datetime.fromtimestamp(started, UTC)
        info = ModelInfo(
            id=name, created_at=created, display_name=name, lifecycle="active", type="model"
        )
        return info.model_dump(mode="json", exclude_unset=True)

    @app.get("/sessions/{session_id}/v1/models")
    async def listing(session_id: str, request: Request) -> Response:
        found = await model(request, session_id)
        if not is_anthropic(request):
            return JSONResponse({"object": "list", "data": [found]})
        page = {"first_id": found["id"], "last_id": found["id"], "has_more": False}
        return JSONResponse({"data": [found], **page})

    @app.get("/sessions/{session_id}/v1/models/{name:path}")
    async def one(session_id: str, name: str, request: Request) -> Response:  # it has any name
        return JSONResponse(await model(request, session_id))


def is_anthropic(request: Request) -> bool:
    """Return whether a request is of Anthropic's clients."""
    return "anthropic-version" in request.headers
