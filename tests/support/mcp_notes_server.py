"""A real MCP server of the official SDK, run as a process by the MCP tests.

`python mcp_notes_server.py stdio` or `python mcp_notes_server.py http PORT [stateless]`. Its notes
live in memory, per MCP session over HTTP. Every start appends its process id to the file that the
variable NOTES_STARTS names, every call of `slow` a line to that of NOTES_CALLS; NOTES_VERSION is
its version, NOTES_SLOW_START seconds of sleep.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
import time
from pathlib import Path

from agent_r1.runtime.imports import quick_imports

with quick_imports():
    from mcp.server.mcpserver import Context, MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.shared.exceptions import MCPError
    from mcp_types import (
        INVALID_PARAMS,
        AudioContent,
        CallToolResult,
        EmbeddedResource,
        ImageContent,
        ResourceLink,
        TextContent,
        TextResourceContents,
        ToolAnnotations,
    )
    from pydantic import BaseModel

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()

server = MCPServer("notes", version=os.environ.get("NOTES_VERSION", "1.0"))
notes: dict[str, list[str]] = {}
started = time.monotonic()


class Found(BaseModel):
    """What `look_up` found."""

    title: str
    hits: int


def note_line(variable: str, line: object) -> None:
    """Append a line to the file that a variable names, if it does."""
    if path := os.environ.get(variable):
        with Path(path).open("a") as file:
            file.write(f"{line}\n")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def echo(text: str) -> str:
    """Repeats a text."""
    return f"you said: {text}"


@server.tool()
def note(text: str, context: Context) -> str:
    """Adds a note and returns all notes of this session."""
    session = (context.headers or {}).get("mcp-session-id", "-")
    kept = notes.setdefault(session, [])
    kept.append(text)
    return ", ".join(kept)


@server.tool()
def look_up(title: str) -> Found:
    """Looks a title up."""
    return Found(title=title, hits=3)


@server.tool()
def table() -> CallToolResult:
    """Answers structured content without any text."""
    return CallToolResult(content=[], structured_content={"rows": [1, 2]})


@server.tool()
def blocks(kind: str) -> CallToolResult:
    """Answers content of a kind."""
    link = ResourceLink(name="report", uri="file:///r.txt")
    page = TextResourceContents(uri="file:///p.txt", text="a page", mime_type="text/plain")
    content = {
        "png": ImageContent(data=PNG, mime_type="image/png"),
        "gif": ImageContent(data=PNG, mime_type="image/gif"),
        "broken": ImageContent(data="%%%", mime_type="image/png"),
        "audio": AudioContent(data=PNG, mime_type="audio/wav"),
        "link": link,
        "page": EmbeddedResource(resource=page),
    }[kind]
    return CallToolResult(content=[TextContent(text="see:"), content])


@server.tool()
def big(characters: int) -> str:
    """Answers a long text."""
    return "x" * characters


@server.tool()
async def slow(seconds: float) -> str:
    """Takes its time; other calls go on."""
    note_line("NOTES_CALLS", "slow")
    await asyncio.sleep(seconds)
    return "done at last"


@server.tool()
async def hang(seconds: float) -> str:
    """Blocks the whole server."""
    time.sleep(seconds)  # noqa: ASYNC251 - a server that hangs is what is tested
    return "never mind"


@server.tool()
def fail(how: str) -> str:
    """Fails in a way of your choice."""
    if how == "error":
        raise ToolError("no such note")
    if how == "refuse":
        raise MCPError(INVALID_PARAMS, "how must not be refuse")
    if how == "protocol":
        raise MCPError(-32050, "the disk is full")
    if how == "die":
        os._exit(3)
    return "did not fail"


@server.tool()
def who() -> str:
    """Says which process answers, and the variables it sees."""
    secret = os.environ.get("NOTES_SECRET", "-")
    return f"pid={os.getpid()} secret={secret} other={os.environ.get('NOTES_OTHER', '-')}"


def main() -> None:
    """Serve as the command line says."""
    note_line("NOTES_STARTS", os.getpid())
    if os.environ.get("NOTES_MODE") == "crash":
        sys.exit("notes: the database is missing")
    time.sleep(float(os.environ.get("NOTES_SLOW_START", "0")))
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[2]), stateless_http="stateless" in sys.argv)


if __name__ == "__main__":
    main()
