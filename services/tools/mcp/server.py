"""Our tools for ordinary MCP agents: `/mcp` of a tool service (streamable HTTP), and stdio.

An MCP client's calls go through the same `ToolService` as rollout's: the same schema check,
sessions, limits and draining. A tool with sessions opens one per MCP session; it is closed when the
client ends its session, or expires. `data` of a result and `tool_context` never cross: the first is
not for a model, the second comes with tasks, which MCP callers do not have.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import HTTPException
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http import MCP_SESSION_ID_HEADER
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    UNSUPPORTED_PROTOCOL_VERSION,
    CallToolRequestParams,
    CallToolResult,
    DiscoverResult,
    ListToolsResult,
    PaginatedRequestParams,
    RequestParams,
    ToolAnnotations,
    UnsupportedProtocolVersionErrorData,
)
from mcp_types import Tool as McpToolOffer
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent_r1.runtime.http.guard import MAX_BODY_BYTES
from agent_r1.tools.app import ToolService
from agent_r1.tools.base import ToolUnavailableError
from agent_r1.tools.mcp.content import to_mcp_result
from agent_r1.tools.results import BrokenToolError
from agent_r1.tools.sessions import SessionNotOpenError
from agent_r1_proto.tools import CallRequest, SessionRequest, ToolCall

CALL_TIMEOUT_S = 60.0


class McpFace:
    """A tool service as MCP clients see it; with `one_client` (stdio) the process is a session."""

    def __init__(
        self, service: ToolService, *, one_client: bool, timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self.stdio_id = f"mcp/stdio-{uuid.uuid4().hex[:8]}"
        self._opened: dict[str, asyncio.Task[None]] = {}
        """Per MCP session that called: its opening of a session of the tool, done or not."""
        self._turns: dict[str, int] = {}
        self.server: Server[dict[str, Any]] = Server(
            service.spec.name,
            version=service.spec.version,
            on_list_tools=self._list,
            on_call_tool=self._call,
        )
        if service.spec.sessions and not one_client:
            # Over HTTP MCP's newest revision has no sessions; clients fall back to one that does.
            self.server.add_request_handler("server/discover", RequestParams, self._discover)

    async def end_session(self, session_id: str) -> None:
        """Close what one MCP session opened; one that opened nothing changes nothing."""
        self._turns.pop(session_id, None)
        if self._opened.pop(session_id, None) is not None:
            await self._service.close(SessionRequest(rollout_id=session_id))

    async def _list(
        self, _: ServerRequestContext[dict[str, Any]], __: PaginatedRequestParams | None
    ) -> ListToolsResult:
        spec = self._service.spec
        return ListToolsResult(
            tools=[
                McpToolOffer(
                    name=spec.name,
                    description=spec.description,
                    input_schema=spec.parameters,
                    annotations=ToolAnnotations(idempotent_hint=spec.idempotent),
                )
            ]
        )

    async def _discover(
        self, context: ServerRequestContext[dict[str, Any]], _: RequestParams
    ) -> DiscoverResult:
        return DiscoverResult(
            supported_versions=list(HANDSHAKE_PROTOCOL_VERSIONS),
            capabilities=self.server.get_capabilities(protocol_version=context.protocol_version),
            ttl_ms=0,
            cache_scope="private",
        )

    async def _call(
        self, context: ServerRequestContext[dict[str, Any]], params: CallToolRequestParams
    ) -> CallToolResult:
        spec = self._service.spec
        if params.name != spec.name:
            raise MCPError(
                INVALID_PARAMS, f"there is no tool {params.name!r}; this server has {spec.name!r}"
            )
        caller = await self._caller(context)
        call = ToolCall(
            name=spec.name,
            arguments=params.arguments or {},
            rollout_id=caller,
            turn=self._turns.get(caller, 0),
            timeout_s=self._timeout_s,
        )
        if spec.sessions:
            self._turns[caller] = call.turn + 1
        try:
            reply = await self._service.call(CallRequest(calls=[call]))
        except HTTPException as exc:
            raise MCPError(INTERNAL_ERROR, str(exc.detail)) from exc
        except (ToolUnavailableError, BrokenToolError) as exc:
            raise MCPError(INTERNAL_ERROR, str(exc)) from exc
        except SessionNotOpenError as exc:
            self._turns.pop(caller, None)
            raise MCPError(
                INVALID_REQUEST,
                "the session's state has expired; begin a new MCP session (initialize again)",
            ) from exc
        return to_mcp_result(reply.results[0])

    async def _caller(self, context: ServerRequestContext[dict[str, Any]]) -> str:
        """Return the rollout id of a caller, with an open session where the tool keeps one."""
        request = context.request
        if not isinstance(request, Request):
            caller = self.stdio_id
        else:
            session_id = request.headers.get(MCP_SESSION_ID_HEADER)
            caller = session_name(session_id or uuid.uuid4().hex)
            if session_id is None and self._service.spec.sessions:
                raise MCPError(
                    UNSUPPORTED_PROTOCOL_VERSION,
                    f"the tool {self._service.spec.name!r} keeps state per session, which "
                    f"revision {context.protocol_version} of MCP does not have; "
                    "connect with initialize",
                    UnsupportedProtocolVersionErrorData(
                        supported=list(HANDSHAKE_PROTOCOL_VERSIONS),
                        requested=context.protocol_version,
                    ).model_dump(by_alias=True),
                )
        if self._service.spec.sessions:
            await self._open(caller)
        return caller

    async def _open(self, caller: str) -> None:
        """Open the tool's session of a caller once, however many first calls come together."""
        if caller not in self._opened:
            opening = self._service.open(SessionRequest(rollout_id=caller))
            self._opened[caller] = asyncio.create_task(opening)
        try:
            await asyncio.shield(self._opened[caller])
        except (HTTPException, ToolUnavailableError, BrokenToolError) as exc:
            self._opened.pop(caller, None)
            detail = str(exc.detail if isinstance(exc, HTTPException) else exc)
            raise MCPError(INTERNAL_ERROR, detail) from exc


def session_name(session_id: str) -> str:
    """Return the rollout id under which a tool service knows an MCP session."""
    return f"mcp/{session_id}"


@asynccontextmanager
async def http_server(
    service: ToolService, *, session_expiry_s: float = 600.0, timeout_s: float = CALL_TIMEOUT_S
) -> AsyncIterator[ASGIApp]:
    """Serve MCP clients over streamable HTTP while inside; yield the application that answers."""
    face = McpFace(service, one_client=False, timeout_s=timeout_s)
    manager = StreamableHTTPSessionManager(
        face.server,
        # `HttpGuard` in front of the service checks the names of every route.
        security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        session_idle_timeout=session_expiry_s,
        max_request_body_size=MAX_BODY_BYTES,
    )
    serve = StreamableHTTPASGIApp(manager)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the SDK does, and note that a client has ended its session."""
        request = Request(scope)
        session_id = request.headers.get(MCP_SESSION_ID_HEADER)
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        await serve(scope, receive, watched)
        if request.method == "DELETE" and session_id is not None and status < 400:
            await face.end_session(session_name(session_id))

    async with manager.run():
        yield answer


async def serve_stdio(service: ToolService, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
    """Serve one client over this process's standard input and output, until it goes away."""
    face = McpFace(service, one_client=True, timeout_s=timeout_s)
    async with service.running():
        async with stdio_server() as (reading, writing):
            await face.server.run(reading, writing, face.server.create_initialization_options())
        await face.end_session(face.stdio_id)
