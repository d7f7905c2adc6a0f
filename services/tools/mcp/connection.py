"""One connection to one MCP server, and what the server offers.

`client.py` opens connections and calls through them. The SDK's client must be entered and left
by one task, and a transport that breaks cancels that task; so every connection has a task of its
own, and callers wait for answers or for its end, whichever comes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

import anyio
import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import MCP_SESSION_ID, streamable_http_client
from mcp_types import CONNECTION_CLOSED, CallToolResult, Implementation, Tool
from pydantic import ValidationError

from agent_r1.tools.mcp.listing import Notes, mended
from agent_r1.tools.mcp.settings import McpSettings

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""Longest wait for a connection to end by itself; a server's process gets 4 s of it."""
LOSS_TIMEOUT_S = 1.0
HTTP_CONNECT_TIMEOUT_S = 10.0
MAX_EVENT_BYTES = 64 << 20
"""Most bytes of one answer over HTTP; larger ones break the connection."""
MAX_TOOL_PAGES = 100
SHARED_MODE = "auto"
SESSION_MODE = "legacy"
"""Sessions over HTTP are of MCP's handshake era; the revision of 2026-07-28 has none."""
STDERR_TAIL_CHARS = 500

T = TypeVar("T")


class McpLostError(Exception):
    """The connection broke, or the server does not speak MCP as it should.

    Attributes:
        sent: the request may have run; False where it surely did not.
    """

    def __init__(self, detail: str, *, sent: bool = True) -> None:
        super().__init__(detail)
        self.sent = sent


@dataclass(frozen=True)
class Offer:
    """One tool as its server offers it."""

    server: str
    """Name and version of the server."""
    tool: Tool
    left_out: Sequence[str] = ()
    """Parts of its entry that cannot be used here, with the place."""

    @property
    def version(self) -> str:
        """Server name and version, and a hash of what the model reads about the tool."""
        shown = json.dumps([self.tool.description, self.tool.input_schema], sort_keys=True)
        return f"{self.server}+{hashlib.sha256(shown.encode()).hexdigest()[:8]}"


@dataclass(eq=False)
class McpConnection:
    """A connection to the server of `settings`."""

    settings: McpSettings
    """Settings of the connection."""
    stateful: bool
    """Insist on a session of the server's (HTTP); a process always has its own state."""
    errlog: IO[str] | None = None
    """File for a started server's standard error; None is this process's."""
    _client: Client | None = field(default=None, init=False)
    _owner: asyncio.Task[None] | None = field(default=None, init=False)
    _ready: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _closing: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _session_id: str | None = field(default=None, init=False)
    _session_gone: bool = field(default=False, init=False)
    _http_status: str = field(default="", init=False)
    _cause: BaseException | None = field(default=None, init=False)
    _left_out: Notes = field(default_factory=dict, init=False)

    @property
    def alive(self) -> bool:
        """False once the connection has ended, or was told to."""
        running = self._owner is not None and not self._owner.done()
        return running and self._ready.is_set() and not self._closing.is_set()

    async def open(self) -> None:
        """Connect and shake hands.

        Raises:
            ValueError: a variable of the environment is missing, or the server keeps no sessions.
            McpLostError: the server cannot be started or reached, or does not speak MCP.
        """
        owner = self._owner = asyncio.create_task(self._hold())
        ready = asyncio.create_task(self._ready.wait())
        try:
            async with asyncio.timeout(self.settings.connect_timeout_s):
                await asyncio.wait({owner, ready}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError as exc:
            await self.close()
            raise McpLostError(
                f"no answer within {self.settings.connect_timeout_s:g} s "
                "(settings.connect_timeout_s)",
                sent=False,
            ) from exc
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            ready.cancel()
        if owner.done():
            cause = self._cause
            if isinstance(cause, ValueError) and not isinstance(cause, ValidationError):
                raise cause
            raise McpLostError(self._describe_cause(), sent=False) from cause
        if self.stateful and self.settings.url is not None and self._session_id is None:
            await self.close()
            raise ValueError(
                f"the MCP server at {self.settings.url} opens no sessions, so it keeps nothing "
                'per trajectory; set settings.isolation = "shared", or make the server stateful'
            )

    async def close(self) -> None:
        """End the connection, and the server's process with it; at most a few seconds."""
        self._closing.set()
        owner = self._owner
        if owner is None or owner.done():
            return
        if self._ready.is_set():
            await asyncio.wait({owner}, timeout=CLOSE_TIMEOUT_S)
        if not owner.done():
            owner.cancel()
            await asyncio.wait({owner}, timeout=CLOSE_TIMEOUT_S)
        if not owner.done():
            logger.warning("mcp connection does not end server=%s", self.settings.address)

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool.

        Raises:
            MCPError: the server refused the request; the connection stays open.
            McpLostError: the connection broke, or the answer is not what MCP says.
        """
        return await self._ask(lambda client: client.call_tool(tool, arguments))

    async def offers(self) -> list[Offer]:
        """Return every tool the server offers.

        Raises:
            MCPError: the server refused the request.
            McpLostError: the connection broke.
        """
        tools: list[Tool] = []
        cursor: str | None = None
        for _ in range(MAX_TOOL_PAGES):
            page = await self._ask(lambda client, at=cursor: client.list_tools(cursor=at))
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        info = self._client.server_info if self._client is not None else None
        server = f"{info.name}-{info.version}" if info is not None else "unnamed"
        return [Offer(server, tool, self._left_out.get(tool.name, ())) for tool in tools]

    async def _ask(self, request: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        client, owner = self._client, self._owner
        if not self.alive or client is None or owner is None:
            raise McpLostError(self._describe_cause(), sent=False)
        try:
            return await request(client)
        except MCPError as exc:
            if self._session_gone:
                self._closing.set()
                raise McpLostError("the server has forgotten the session", sent=False) from exc
            if exc.code != CONNECTION_CLOSED:
                raise
            # The transport's own error, which says more, ends the owner a moment later.
            self._closing.set()
            await asyncio.wait({owner}, timeout=LOSS_TIMEOUT_S)
            unreached = isinstance(_root(self._cause), httpx2.ConnectError)
            raise McpLostError(self._describe_cause(), sent=not unreached) from exc
        except (RuntimeError, ValidationError) as exc:
            raise McpLostError(f"the answer is not valid MCP: {exc}") from exc
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError) as exc:
            self._closing.set()
            raise McpLostError(f"{type(exc).__name__}: {exc}") from exc

    async def _hold(self) -> None:
        """Keep the connection open until it is told to close, or breaks."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._client = await stack.enter_async_context(await self._new_client(stack))
                self._ready.set()
                await self._closing.wait()
        except asyncio.CancelledError as exc:
            self._cause = self._cause or exc
        except Exception as exc:  # noqa: BLE001 - the SDK's transports raise anything; open() maps it
            self._cause = exc
            if self._ready.is_set():
                logger.warning(
                    "mcp connection lost server=%s error=%s",
                    self.settings.address,
                    self._describe_cause(),
                )

    async def _new_client(self, stack: contextlib.AsyncExitStack) -> Client:
        settings = self.settings
        mode = SESSION_MODE if self.stateful and settings.url is not None else SHARED_MODE
        if settings.url is not None:
            http = await stack.enter_async_context(
                httpx2.AsyncClient(
                    headers=settings.resolved_headers(),
                    # Every call runs under its own deadline, so reading has none.
                    timeout=httpx2.Timeout(None, connect=HTTP_CONNECT_TIMEOUT_S),
                    event_hooks={"response": [self._note_response]},
                )
            )
            transport = streamable_http_client(
                settings.url, http_client=http, max_sse_event_size=MAX_EVENT_BYTES
            )
        else:
            assert settings.command is not None  # of McpSettings: one of the two is set
            program, *arguments = settings.command
            transport = stdio_client(
                StdioServerParameters(
                    command=program,
                    args=arguments,
                    env=settings.passed_environment(),
                    cwd=settings.cwd,
                ),
                errlog=self.errlog or sys.__stderr__ or sys.stderr,  # type: ignore[arg-type]
            )
        ours = Implementation(name="agent-r1", version=importlib.metadata.version("agent-r1"))
        transport = mended(transport, self._left_out)
        return Client(transport, mode=mode, cache=None, client_info=ours)

    async def _note_response(self, response: httpx2.Response) -> None:
        if response.is_error:
            self._http_status = f"{response.status_code} {response.reason_phrase}"
        # What MCP says a server answers to a session it does not know, after a restart say.
        if response.status_code == httpx2.codes.NOT_FOUND and self._session_id is not None:
            self._session_gone = True
        self._session_id = response.headers.get(MCP_SESSION_ID, self._session_id)

    def _describe_cause(self) -> str:
        cause = _root(self._cause)
        if isinstance(cause, MCPError) and self._http_status:
            return f"it answered HTTP {self._http_status}"
        if cause is None or isinstance(cause, asyncio.CancelledError):
            return "the server closed the connection"
        if isinstance(cause, MCPError):
            return cause.message
        if isinstance(cause, FileNotFoundError | PermissionError):
            # Which of the two it is depends on folders of PATH that this user may not read.
            return f"the program is not on PATH or may not be run ({cause})"
        return f"{type(cause).__name__}: {cause}"


def _root(cause: BaseException | None) -> BaseException | None:
    """Return what lies inside the exception groups of the SDK's task groups."""
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause


async def fetch_offer(settings: McpSettings) -> Offer:
    """Return the tool of `settings` as its server offers it, over a connection of its own.

    Raises:
        ValueError: the server does not start or answer, or does not offer the tool.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as errlog:
        connection = McpConnection(
            settings, stateful=settings.isolation == "rollout", errlog=errlog
        )
        try:
            await connection.open()
            async with asyncio.timeout(settings.connect_timeout_s):
                offers = await connection.offers()
        except (McpLostError, MCPError, TimeoutError) as exc:
            remedy = (
                "correct settings.url and settings.headers, and see that the server runs"
                if settings.url is not None
                else "run settings.command by hand to see what it needs, correct settings.env, or "
                "raise settings.connect_timeout_s"
            )
            raise ValueError(
                f"the MCP server {settings.address!r} does not answer: "
                f"{exc or 'it sent no list of tools in time'}{_tail(errlog)}; {remedy}"
            ) from exc
        finally:
            await connection.close()
    return choose(offers, settings)


def choose(offers: list[Offer], settings: McpSettings) -> Offer:
    """Return the offer of the configured tool.

    Raises:
        ValueError: the server does not offer it; the text lists what it offers.
    """
    for offer in offers:
        if offer.tool.name == settings.tool:
            return offer
    names = ", ".join(sorted(offer.tool.name for offer in offers)) or "no tools"
    raise ValueError(
        f"the MCP server {settings.address!r} does not offer settings.tool ({settings.tool!r}); "
        f"it offers {names}"
    )


def _tail(errlog: IO[str]) -> str:
    errlog.seek(0)
    text = errlog.read().strip()
    return f"; its last output: {text[-STDERR_TAIL_CHARS:]}" if text else ""
