"""Lists of tools as servers send them, mended before the SDK reads them.

The SDK refuses a whole list for one entry that is not as MCP says. `connection.py` lets the
messages of its transport pass through `MendedStream`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from mcp.client import Transport
from mcp.shared.message import SessionMessage
from mcp_types.jsonrpc import JSONRPCResponse
from mcp_types.methods import validate_server_result
from pydantic import ValidationError

from agent_r1.runtime.argument_schema import find_problem
from agent_r1.tools.mcp.schema import relax

_METHOD = "tools/list"
_STRICTEST = "2025-11-25"
"""Of the revisions of MCP, in what it asks of an entry."""
_NEEDED = {"name", "inputSchema"}

Notes = dict[str, list[str]]
"""Parts that were left out of a tool's entry, by tool."""


class MendedStream:
    """A transport's incoming messages, in which lists of tools are mended."""

    def __init__(self, stream: Any, notes: Notes) -> None:
        self._stream = stream
        self._notes = notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> MendedStream:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> bool | None:
        return await self._stream.__aexit__(*raised)

    def __aiter__(self) -> MendedStream:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        return await self._mend(await self._stream.__anext__())

    async def receive(self) -> SessionMessage | Exception:
        return await self._mend(await self._stream.receive())

    async def _mend(self, item: SessionMessage | Exception) -> SessionMessage | Exception:
        if isinstance(item, SessionMessage) and isinstance(item.message, JSONRPCResponse):
            tools = item.message.result.get("tools")
            if isinstance(tools, list):
                # In a thread: large schemas take seconds, and other tools are called meanwhile.
                mended = await asyncio.to_thread(mend_tools, tools, self._notes)
                item.message.result["tools"] = mended
        return item


@contextlib.asynccontextmanager
async def mended(transport: Transport, notes: Notes) -> AsyncIterator[Any]:
    """Open a transport whose lists of tools are mended; `notes` gets what was left out."""
    async with transport as (incoming, outgoing):
        yield MendedStream(incoming, notes), outgoing


def mend_tools(tools: list[Any], notes: Notes) -> list[Any]:
    """Return the entries that have a name, without what nobody can read in them."""
    named = [one for one in tools if isinstance(one, dict) and isinstance(one.get("name"), str)]
    return [_mend_tool(tool, notes) for tool in named]


def _mend_tool(tool: dict[str, Any], notes: Notes) -> dict[str, Any]:
    schema, left_out = relax(tool.get("inputSchema"))
    mended = {**tool, "inputSchema": schema}
    output = tool.get("outputSchema")
    problem = find_problem(output) if isinstance(output, dict) else None
    if problem is not None:
        mended["outputSchema"] = None
        left_out.append(f"outputSchema: {problem}")
    for key, why in _wrong_fields(mended).items():
        mended[key] = None
        left_out.append(f"{key}: {why}")
    notes[tool["name"]] = left_out
    return mended


def _wrong_fields(tool: dict[str, Any]) -> dict[str, str]:
    """Return the fields that the SDK would refuse, and why."""
    try:
        validate_server_result(_METHOD, _STRICTEST, {"tools": [tool]})
    except ValidationError as exc:
        places = [(error["loc"], error["msg"]) for error in exc.errors(include_url=False)]
        # ("tools", 0, field, ...)
        wrong = {str(loc[2]): msg for loc, msg in places if len(loc) > 2}
        return {key: msg for key, msg in wrong.items() if key not in _NEEDED}
    return {}
