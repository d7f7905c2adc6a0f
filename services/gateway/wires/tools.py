"""The tools of the run, as agents call them: the same services, limits and context as in the loop.

`GET /sessions/{id}/tools` lists them as chat templates and OpenAI's API take them; `POST
/sessions/{id}/tools/{name}` takes a JSON object of arguments and answers `{"status", "text"}`.
Errors have the form of Chat Completions.
"""

from __future__ import annotations

import json
from typing import Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import JsonValue, TypeAdapter, ValidationError

from agent_r1.gateway.wire import WireError
from agent_r1.gateway.wires.history import check_nesting
from agent_r1.gateway.wires.http import key_of
from agent_r1_proto.tools import ToolResult, ToolSpec

_ARGUMENTS: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])
S = TypeVar("S")


class ToolSessions(Protocol[S]):
    """The sessions of this gateway, and the tools that they may call."""

    async def find(self, session_id: str, key: str) -> S:
        """Return an open session; see `Sessions.find`."""
        ...

    def offered(self, session: S) -> dict[str, ToolSpec]:
        """Return the tools that a session may call, by name."""
        ...

    async def call_tool(self, session: S, name: str, arguments: dict[str, JsonValue]) -> ToolResult:
        """Answer a call.

        Raises:
            WireError: the tool is not offered, or a service failed.
        """
        ...


def add_tools(app: FastAPI, sessions: ToolSessions[S]) -> None:
    """Add the routes to an application that answers a `WireError`, as that of app.py does."""

    @app.get("/sessions/{session_id}/tools")
    async def listing(session_id: str, request: Request) -> Response:
        offered = sessions.offered(await sessions.find(session_id, key_of(request)))
        return JSONResponse([spec.as_function() for spec in offered.values()])

    @app.post("/sessions/{session_id}/tools/{name}")
    async def call(session_id: str, name: str, request: Request) -> Response:
        session = await sessions.find(session_id, key_of(request))
        request.state.session = session
        try:
            arguments = _ARGUMENTS.validate_json(await request.body(), strict=True)
            json.dumps(arguments, allow_nan=False)  # which JSON has no numbers for
            check_nesting(arguments)
        except ValidationError as exc:
            problem = f"the body is no JSON object of arguments: {exc.errors()[0]['msg']}"
            raise WireError("invalid_request", problem) from exc
        except (ValueError, RecursionError) as exc:
            raise WireError("invalid_request", f"the body cannot be kept: {exc}") from exc
        result = await sessions.call_tool(session, name, arguments)
        return JSONResponse({"status": result.status, "text": result.text()})
