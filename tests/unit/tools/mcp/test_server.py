"""Our tools over MCP: the official client calls them as any agent would."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp_types import ImageContent, TextContent
from pydantic import JsonValue

from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http.guard import HttpGuard
from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.base import Arguments, CallContext, Tool, ToolUnavailableError, error_result
from agent_r1.tools.config import ToolConfig
from agent_r1.tools.mcp.route import mcp_router
from agent_r1_proto.parts import ImagePart, TextPart
from agent_r1_proto.tools import ToolResult

BASE = "http://127.0.0.1:1"


class Adder(Tool):
    """A small calculator that can also fail in every way."""

    name = "add"
    description = "Adds two numbers."
    version = "3"
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }

    def __init__(self) -> None:
        self.contexts: list[CallContext] = []

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult | str:
        self.contexts.append(context)
        a, b = arguments["a"], arguments["b"]
        assert isinstance(a, int | float)
        assert isinstance(b, int | float)
        if a == 0:
            return error_result("Error: zero is not a number here")
        if a == -1:
            raise ToolUnavailableError("the abacus is being repaired")
        if a == -2:
            await asyncio.sleep(30)
        if a == -3:
            return ToolResult(
                parts=[
                    TextPart(text="a plot"),
                    ImagePart(media_type="image/png", data_base64="iVBORw0KGgo="),
                ],
                data={"hidden": "answer"},
            )
        return str(a + b)


class Counter(Tool):
    """Counts the calls of each session, in memory."""

    name = "count"
    description = "Counts up."
    parameters = {"type": "object"}
    sessions = True

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.turns: list[int] = []
        self.closed: list[int] = []

    async def open(self, rollout_id: str, tool_context: JsonValue) -> None:
        await asyncio.sleep(0.05)
        assert rollout_id not in self.counts
        self.counts[rollout_id] = 0

    async def close(self, rollout_id: str) -> None:
        self.closed.append(self.counts.pop(rollout_id))

    async def call(self, arguments: Arguments, context: CallContext) -> str:
        self.turns.append(context.turn)
        self.counts[context.rollout_id] += 1
        return str(self.counts[context.rollout_id])


class Serving:
    """A tool service with its `/mcp`, in this process."""

    def __init__(self, tool: Tool, **options: Any) -> None:
        config = ToolConfig(session_expiry_s=options.pop("session_expiry_s", 600.0))
        self.app = create_app(ToolService(tool, config=config))
        self.app.include_router(mcp_router(self.app.state.service, **options))

    def http(self, base_url: str = BASE) -> httpx2.AsyncClient:
        """Return an HTTP client of the service."""
        guarded = HttpGuard(self.app, ListenConfig(), None)
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(guarded), base_url=base_url)

    @contextlib.asynccontextmanager
    async def client(self, mode: str = "auto") -> AsyncIterator[Client]:
        """Connect as an MCP agent would."""
        async with self.http() as http:
            transport = streamable_http_client(f"{BASE}/mcp", http_client=http)
            async with Client(transport, mode=mode, cache=None) as client:
                yield client


@contextlib.asynccontextmanager
async def serving(tool: Tool, **options: Any) -> AsyncIterator[Serving]:
    service = Serving(tool, **options)
    async with service.app.router.lifespan_context(service.app):
        yield service


def text(result: Any) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_an_agent_sees_the_tool_and_calls_it(mode: str):
    tool = Adder()
    async with serving(tool) as service, service.client(mode) as client:
        (offer,) = (await client.list_tools()).tools
        assert (offer.name, offer.description) == ("add", "Adds two numbers.")
        assert offer.input_schema == Adder.parameters
        assert client.server_info is not None
        assert (client.server_info.name, client.server_info.version) == ("add", "3")
        assert text(await client.call_tool("add", {"a": 2, "b": 3})) == "5"
    assert tool.contexts[0].rollout_id.startswith("mcp/")
    assert tool.contexts[0].tool_context is None


async def test_arguments_are_checked_by_the_same_schema_and_the_model_reads_why():
    tool = Adder()
    async with serving(tool) as service, service.client() as client:
        result = await client.call_tool("add", {"a": "two", "b": 3})
    assert result.is_error
    assert text(result) == (
        "Error: the arguments are not valid: 'two' is not of type 'number' (at $.a)"
    )
    assert tool.contexts == []


async def test_a_tools_own_error_is_an_answer_and_an_outage_is_a_protocol_error():
    async with serving(Adder()) as service, service.client() as client:
        answer = await client.call_tool("add", {"a": 0, "b": 1})
        assert answer.is_error
        assert text(answer) == "Error: zero is not a number here"
        with pytest.raises(MCPError, match="the abacus is being repaired"):
            await client.call_tool("add", {"a": -1, "b": 1})
        with pytest.raises(MCPError, match="there is no tool 'subtract'; this server has 'add'"):
            await client.call_tool("subtract", {})


async def test_a_call_that_takes_too_long_ends():
    async with serving(Adder(), timeout_s=0.1) as service, service.client() as client:
        with pytest.raises(MCPError, match=r"did not answer within 0\.1 s"):
            await client.call_tool("add", {"a": -2, "b": 1})


async def test_images_cross_and_data_stays_here():
    async with serving(Adder()) as service, service.client() as client:
        result = await client.call_tool("add", {"a": -3, "b": 1})
    assert result.content == [
        TextContent(text="a plot"),
        ImageContent(data="iVBORw0KGgo=", mime_type="image/png"),
    ]
    assert "hidden" not in result.model_dump_json()


async def test_every_mcp_session_has_its_own_state_and_its_end_closes_it():
    tool = Counter()
    async with serving(tool) as service:
        async with service.client() as one, service.client() as other:
            # First calls that come together open one session: `open` asserts it.
            together = await asyncio.gather(*(one.call_tool("count", {}) for _ in range(3)))
            assert sorted(map(text, together)) == ["1", "2", "3"]
            assert text(await other.call_tool("count", {})) == "1"
            assert sorted(tool.turns) == [0, 0, 1, 2]
            assert service.app.state.service.health.sessions == 2
        assert sorted(tool.closed) == [1, 3]
        assert service.app.state.service.health.sessions == 0


async def test_a_client_of_the_revision_without_sessions_falls_back_to_one_with_them():
    async with serving(Counter()) as service:
        async with service.client("auto") as client:
            assert client.protocol_version < "2026"
            assert text(await client.call_tool("count", {})) == "1"
        async with service.client("2026-07-28") as client:
            with pytest.raises(MCPError, match="keeps state per session"):
                await client.call_tool("count", {})


async def test_a_session_whose_state_expired_is_not_silently_begun_anew():
    tool = Counter()
    async with (
        serving(tool, session_expiry_s=0.2) as service,
        service.client("legacy") as client,
    ):
        assert text(await client.call_tool("count", {})) == "1"
        async with asyncio.timeout(10):
            while not tool.closed:  # noqa: ASYNC110 - the service's own clock makes it true
                await asyncio.sleep(0.01)
        with pytest.raises(MCPError, match="state has expired; begin a new MCP session"):
            await client.call_tool("count", {})


async def test_a_web_page_cannot_reach_a_service_of_this_machine_under_another_name():
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    headers = {"accept": "application/json, text/event-stream"}
    async with serving(Adder()) as service:
        async with service.http("http://evil.example") as http:
            assert (await http.post("/mcp", json=body, headers=headers)).status_code == 421
        async with service.http("http://tools:8001") as http:
            assert (await http.post("/mcp", json=body, headers=headers)).status_code != 421


async def test_a_tool_whose_own_code_is_wrong_is_an_error_of_the_server():
    class Wrong(Adder):
        async def call(self, arguments: Arguments, context: CallContext) -> Any:
            return None

    async with serving(Wrong()) as service, service.client() as client:
        with pytest.raises(MCPError, match=r"Wrong\.call returned None; it must return a string"):
            await client.call_tool("add", {"a": 1, "b": 2})


async def test_draining_waits_for_the_sessions_of_mcp_clients():
    tool = Counter()
    async with serving(tool) as service:
        async with service.client("legacy") as client:
            await client.call_tool("count", {})
            drain = asyncio.create_task(service.app.state.service.drain(10))
            await asyncio.sleep(0.05)
            assert not drain.done()
            assert text(await client.call_tool("count", {})) == "2"  # an open session stays open
            async with service.client("legacy") as late:
                with pytest.raises(MCPError, match="is shutting down"):
                    await late.call_tool("count", {})
        await asyncio.wait_for(drain, 10)
