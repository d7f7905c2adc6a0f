"""`/mcp` of a tool service: imports and starts the MCP server when the first client comes.

main.py adds the route; server.py answers. Most services are called by rollout alone, and the
packages of MCP take a third of the CPU time of their start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agent_r1.tools.app import ToolService

MCP_PATH = "/mcp"


class McpEndpoint:
    """Passes requests to the MCP server of a service.

    Args:
        service: the tool.
        settings: of `server.http_server`.
    """

    def __init__(self, service: ToolService, **settings: Any) -> None:
        self._service = service
        self._settings = settings
        self._server: asyncio.Task[None] | None = None
        self._started: asyncio.Future[ASGIApp]
        self._stopped = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; the first one waits until the server is there."""
        if self._server is None:
            self._started = asyncio.get_running_loop().create_future()
            self._server = asyncio.create_task(self._serve())
        answer = await asyncio.shield(self._started)
        await answer(scope, receive, send)

    async def _serve(self) -> None:
        """Run the server from beginning to end, which must be in one task."""
        try:
            server = await asyncio.to_thread(import_module, f"{__package__}.server")
            async with server.http_server(self._service, **self._settings) as answer:
                self._started.set_result(answer)
                await self._stopped.wait()
        except Exception as exc:
            if self._started.done():
                raise
            self._started.set_exception(exc)

    async def stop(self) -> None:
        """Stop the server, if there is one."""
        self._stopped.set()
        if self._server is not None:
            await self._server


def mcp_router(service: ToolService, **settings: Any) -> APIRouter:
    """Return the route `/mcp` of a tool service, which stops with the application.

    Args:
        service: the tool.
        settings: of `server.http_server`.
    """
    endpoint = McpEndpoint(service, **settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await endpoint.stop()

    return APIRouter(routes=[Route(MCP_PATH, endpoint=endpoint)], lifespan=lifespan)
