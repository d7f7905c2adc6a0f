"""HTTP routes of a gateway: those of services, behind the run token, and those that agents call.

Two applications on two ports: agents reach sessions and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from agent_r1.gateway.attempts import AgentAttempts
from agent_r1.gateway.servers import RolloutServers
from agent_r1.gateway.wire import WireError
from agent_r1.gateway.wires.chat import OPENAI_ERRORS, add_chat
from agent_r1.gateway.wires.http import ErrorForm, failed
from agent_r1.gateway.wires.messages import ANTHROPIC_ERRORS, add_messages
from agent_r1.gateway.wires.models import add_models, is_anthropic
from agent_r1.gateway.wires.responses import add_responses
from agent_r1.gateway.wires.tools import add_tools
from agent_r1.runtime.http.api import Route, describe
from agent_r1_proto.messages import Message
from agent_r1_proto.session_log import SessionTakenError


class GatewayHealth(Message):
    """Answer of `GET /healthz` and `GET /readyz`."""

    status: Literal["ok", "no_servers"]
    server_id: str
    policy_version: int
    """Highest version that a rollout server holds; -1 without one."""
    in_flight: int
    """Attempts being worked on."""


ROUTES = (
    Route("/healthz", "get", answer=GatewayHealth),
    Route(
        "/readyz",
        "get",
        answer=GatewayHealth,
        errors={"503": "No rollout server is announced."},
    ),
)


WIRE_ROUTES = (
    "POST /v1/chat/completions, /v1/responses and /v1/messages, GET /v1/models, GET /tools and "
    "POST /tools/NAME"
)


def create_app(*, server_id: str, servers: RolloutServers, in_flight: Callable[[], int]) -> FastAPI:
    """Build the application that services call."""
    app = FastAPI(title="Agent-R1 gateway", docs_url=None, redoc_url=None)
    describe(app, ROUTES)

    def health() -> GatewayHealth:
        return GatewayHealth(
            status="ok" if servers.held >= 0 else "no_servers",
            server_id=server_id,
            policy_version=servers.held,
            in_flight=in_flight(),
        )

    @app.get("/healthz")
    async def healthz() -> Response:
        return JSONResponse(health().model_dump())

    @app.get("/readyz")
    async def readyz() -> Response:
        body = health()
        return JSONResponse(body.model_dump(), 200 if body.status == "ok" else 503)

    return app


def create_wire(attempts: AgentAttempts) -> FastAPI:
    """Build the application that agents call."""
    app = FastAPI(title="Agent-R1 sessions", docs_url=None, redoc_url=None, openapi_url=None)
    add_chat(app, attempts)
    add_responses(app, attempts)
    add_messages(app, attempts)
    add_models(app, attempts)
    add_tools(app, attempts)

    @app.exception_handler(Exception)
    async def refuse(request: Request, error: Exception) -> Response:
        form = ANTHROPIC_ERRORS if is_anthropic(request) else _error_form(request.url.path)
        return form.response(failed(error, getattr(request.state, "session", None)))

    app.add_exception_handler(WireError, refuse)
    app.add_exception_handler(SessionTakenError, refuse)

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        text = f"{error.detail}; the routes are {WIRE_ROUTES}"
        content = error_body(request.url.path, error.status_code, text)
        return JSONResponse(content, error.status_code, error.headers)

    return app


def error_body(path: str, status: int, message: str) -> object:
    """Return an error in the form of the wire that was called, for one that comes before it."""
    return _error_form(path).body_of_status(status, message)


def _error_form(path: str) -> ErrorForm:
    return ANTHROPIC_ERRORS if "/v1/messages" in path else OPENAI_ERRORS
