"""`McpTool`: one tool of an MCP server, attached as a tool service by configuration.

Reads calls from the tool service (`app.py`), sends them to the MCP server over stdio or streamable
HTTP, maps the answers back. How a call can end:

- an answer, `isError` included, and arguments the server refuses: the model reads it;
- a server that is down, refuses the request, breaks off or answers nonsense: an outage
  (`ToolUnavailableError`). A shared server is started or reached again for the next call; a
  trajectory's own server took its state with it, so the attempt fails.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from mcp import MCPError
from mcp_types import INVALID_PARAMS, CallToolResult, TextContent
from pydantic import JsonValue

from agent_r1.tools.base import (
    Arguments,
    CallContext,
    Tool,
    ToolUnavailableError,
    error_result,
    parse_settings,
)
from agent_r1.tools.mcp.connection import McpConnection, McpLostError, Offer, choose, fetch_offer
from agent_r1.tools.mcp.content import to_tool_result
from agent_r1.tools.mcp.settings import McpSettings
from agent_r1_proto.tools import ToolResult

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
PROBE_TIMEOUT_S = 5.0
_UNKNOWN_TOOL = re.compile(r"unknown tool|tool .*not found", re.IGNORECASE)


@dataclass
class Connector:
    """Opens connections to a server that still offers the same; waits longer after failures."""

    settings: McpSettings
    offer: Offer
    _delay_s: float = field(default=FIRST_DELAY_S, init=False)
    _not_before: float = field(default=0.0, init=False)
    _problem: str = field(default="", init=False)

    async def connect(self) -> McpConnection:
        """Open a connection.

        Raises:
            ToolUnavailableError: the server is down, has changed, or was down a moment ago.
        """
        wait_s = self._not_before - time.monotonic()
        if wait_s > 0:
            raise ToolUnavailableError(f"{self._problem}; the next try is in {wait_s:.1f} s")
        settings = self.settings
        connection = McpConnection(settings, stateful=settings.isolation == "rollout")
        try:
            await connection.open()
            async with asyncio.timeout(settings.connect_timeout_s):
                now = choose(await connection.offers(), settings)
            if now.version != self.offer.version:
                raise ValueError(
                    f"the MCP server {settings.address!r} is now {now.version}, and this service "
                    f"announced {self.offer.version}; restart the tool service to take it up"
                )
        except (McpLostError, MCPError, TimeoutError, ValueError) as exc:
            await connection.close()
            down = f"the MCP server {settings.address!r} does not answer: {exc or 'time is up'}"
            self._problem = str(exc) if isinstance(exc, ValueError) else down
            self._not_before = time.monotonic() + self._delay_s
            self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)
            raise ToolUnavailableError(self._problem) from exc
        except asyncio.CancelledError:
            await connection.close()
            raise
        self._delay_s = FIRST_DELAY_S
        return connection


class McpTool(Tool):
    """One tool of one MCP server.

    The server is asked once, here, for the tool's description and schema, over a connection of
    its own; `start` then opens the one that serves.

    Args:
        settings: the keys of `mcp_settings.McpSettings`.

    Raises:
        ValueError: the settings are wrong, the server does not answer, or it lacks the tool.
    """

    def __init__(self, **settings: object) -> None:
        self.settings = parse_settings(McpSettings, settings)
        # A thread of its own: the service builds its tool while its event loop already runs.
        with ThreadPoolExecutor(1, thread_name_prefix="mcp") as thread:
            offer = thread.submit(lambda: asyncio.run(fetch_offer(self.settings))).result()
        for problem in offer.left_out:
            logger.warning(
                "part of a tool is left to its server to check tool=%s server=%s problem=%s",
                self.settings.tool,
                self.settings.address,
                problem,
            )
        hints = offer.tool.annotations
        hinted = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        self.name = offer.tool.name
        self.description = self.settings.description or offer.tool.description or offer.tool.name
        self.parameters = offer.tool.input_schema
        self.version = offer.version
        self.sessions = self.settings.isolation == "rollout"
        self.idempotent = hinted if self.settings.idempotent is None else self.settings.idempotent
        reads = hints is not None and bool(hints.read_only_hint)
        has_effects = self.settings.outside_effects
        self.outside_effects = not reads if has_effects is None else has_effects
        self._connector = Connector(self.settings, offer)
        self._shared: McpConnection | None = None
        self._connecting: asyncio.Task[McpConnection] | None = None
        self._own: dict[str, McpConnection] = {}
        self._slots = asyncio.Semaphore(self.settings.max_sessions)
        self._probes: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Connect the shared connection, so that a server that is down shows at start."""
        if not self.sessions:
            await self._shared_connection()

    async def stop(self) -> None:
        """End every connection."""
        tasks = {*self._probes, *({self._connecting} if self._connecting else ())}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        connections = [*self._own.values(), *([self._shared] if self._shared else [])]
        await asyncio.gather(*(connection.close() for connection in connections))

    async def open(self, rollout_id: str, tool_context: JsonValue) -> None:
        """Give one rollout a connection of its own.

        Raises:
            ToolUnavailableError: the server is down, or no session became free in time.
        """
        timeout_s = self.settings.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots.acquire()
        except TimeoutError as exc:
            raise ToolUnavailableError(
                f"{self.settings.max_sessions} sessions are open (settings.max_sessions) and none "
                f"ended within {timeout_s:g} s; raise it, or start more instances"
            ) from exc
        try:
            self._own[rollout_id] = await self._connector.connect()
        except BaseException:
            self._slots.release()
            raise

    async def close(self, rollout_id: str) -> None:
        """End a rollout's connection; a started server's process ends with it."""
        connection = self._own.pop(rollout_id)
        try:
            await connection.close()
        finally:
            self._slots.release()

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult:
        """Send one call.

        Raises:
            ToolUnavailableError: the server did not answer it.
        """
        connection: McpConnection | None = None
        try:
            async with asyncio.timeout(context.timeout_s):
                if self.sessions:
                    connection = self._own[context.rollout_id]
                    return await self._ask(connection, arguments)
                try:
                    connection = await self._shared_connection()
                    return await self._ask(connection, arguments)
                except McpLostError as exc:
                    if exc.sent:
                        raise
                    # It did not run: a server that was restarted takes it at once.
                    connection = await self._shared_connection()
                    return await self._ask(connection, arguments)
        except McpLostError as exc:
            lost = "; the trajectory's session is lost with it" if self.sessions else ""
            raise ToolUnavailableError(
                f"the MCP server {self.settings.address!r} broke the connection: {exc}{lost}"
            ) from exc
        except TimeoutError as exc:
            self._probe_soon(connection)
            raise ToolUnavailableError(
                f"the MCP server {self.settings.address!r} did not answer within "
                f"{context.timeout_s:g} s (timeout_s of the call); raise env.tool_timeout_s"
            ) from exc
        except asyncio.CancelledError:
            self._probe_soon(connection)
            raise

    async def _ask(self, connection: McpConnection, arguments: Arguments) -> ToolResult:
        try:
            answer = await connection.call(self.settings.tool, arguments)
        except MCPError as exc:
            if exc.code != INVALID_PARAMS or not await self._offered(connection):
                raise ToolUnavailableError(
                    f"the MCP server {self.settings.address!r} answered error {exc.code}: "
                    f"{exc.message}"
                ) from exc
            return error_result(f"Error: {exc.message}")
        if _says_unknown(answer) and not await self._offered(connection):
            raise ToolUnavailableError(
                f"the MCP server {self.settings.address!r} no longer offers {self.settings.tool!r}"
            )
        return to_tool_result(answer)

    async def _offered(self, connection: McpConnection) -> bool:
        try:
            offers = await connection.offers()
        except MCPError:
            return False
        return any(offer.tool.name == self.settings.tool for offer in offers)

    async def _shared_connection(self) -> McpConnection:
        """Return the connection all calls share, opened anew where it has ended."""
        if self._shared is not None and self._shared.alive:
            return self._shared
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._reconnect())
        # Shielded: a slow server must come up even when every waiting call is out of time.
        return await asyncio.shield(self._connecting)

    async def _reconnect(self) -> McpConnection:
        try:
            if self._shared is not None:
                await self._shared.close()
            self._shared = await self._connector.connect()
            return self._shared
        finally:
            self._connecting = None

    def _probe_soon(self, connection: McpConnection | None) -> None:
        """See whether the server behind a call that took too long still answers at all."""
        if connection is not None and connection is self._shared and connection.alive:
            probe = asyncio.create_task(self._probe(connection))
            self._probes.add(probe)
            probe.add_done_callback(self._probes.discard)

    async def _probe(self, connection: McpConnection) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await connection.offers()
        except (TimeoutError, McpLostError) as exc:
            logger.warning(
                "mcp server hangs and is given up server=%s error=%s",
                self.settings.address,
                exc or f"no answer within {PROBE_TIMEOUT_S:g} s",
            )
            await connection.close()
        except MCPError:
            return  # it answers


def _says_unknown(answer: CallToolResult) -> bool:
    texts = [block.text for block in answer.content if isinstance(block, TextContent)]
    return answer.is_error and len(texts) == 1 and bool(_UNKNOWN_TOOL.match(texts[0]))
