"""Our tools as MCP servers in processes of their own: streamable HTTP and stdio."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp_types import TextContent

from agent_r1.cli.main import main
from agent_r1.tools.mcp.client import McpTool
from agent_r1_proto.tools import ToolSpec

WAIT_S = 30.0
POLL_S = 0.02
TOOLS = """
import asyncio
from agent_r1 import Tool

class Square(Tool):
    name = "square"
    description = "Squares a number."
    parameters = {
        "type": "object",
        "properties": {"x": {"type": "number"}},
        "required": ["x"],
        "additionalProperties": False,
    }

    async def call(self, arguments, context):
        print("a stray line that must not reach the client")
        return str(arguments["x"] ** 2)

class Count(Tool):
    name = "count"
    description = "Counts."
    parameters = {"type": "object"}
    sessions = True

    def __init__(self):
        self.counts = {}

    async def open(self, rollout_id, tool_context):
        self.counts[rollout_id] = 0

    async def call(self, arguments, context):
        self.counts[context.rollout_id] += 1
        return str(self.counts[context.rollout_id])
"""
CONFIG = """
[run]
plugins = ["{folder}"]
[model]
path = "none"
[tools.square]
type = "my_tools:Square"
[tools.count]
type = "my_tools:Count"
[tools.far]
type = "my_tools:Square"
url = "http://tools:8000/"
"""
STDIO = """
import sys
from agent_r1.cli.main import main
sys.exit(main(["tools", "mcp", *sys.argv[1:]]))
"""
HTTP = """
import sys
import uvicorn
from my_tools import Count
from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.mcp.route import mcp_router
app = create_app(ToolService(Count()))
app.include_router(mcp_router(app.state.service))
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "my_tools.py").write_text(TOOLS)
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(folder=tmp_path))
    return file


def stdio_command(config_file: Path, tool: str) -> StdioServerParameters:
    return StdioServerParameters(command=sys.executable, args=["-c", STDIO, str(config_file), tool])


def text(result: Any) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, TextContent))


async def test_an_agent_starts_a_tool_of_the_configuration_and_calls_it(config_file: Path):
    command = stdio_client(stdio_command(config_file, "square"), errlog=sys.__stderr__)  # type: ignore[arg-type]
    async with Client(command) as client:
        (offer,) = (await client.list_tools()).tools
        assert (offer.name, offer.description) == ("square", "Squares a number.")
        assert text(await client.call_tool("square", {"x": 7})) == "49"
        wrong = await client.call_tool("square", {"y": 7})
        assert wrong.is_error
        assert "the arguments are not valid" in text(wrong)
        with pytest.raises(MCPError, match="there is no tool 'cube'"):
            await client.call_tool("cube", {})


async def test_a_tool_with_state_counts_on_within_one_process(config_file: Path):
    command = stdio_client(stdio_command(config_file, "count"), errlog=sys.__stderr__)  # type: ignore[arg-type]
    async with Client(command) as client:
        assert [text(await client.call_tool("count", {})) for _ in range(3)] == ["1", "2", "3"]


def test_a_tool_that_is_missing_or_runs_elsewhere_is_refused(
    config_file: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["tools", "mcp", str(config_file), "cube"]) == 2
    assert "no [tools.cube]; the tools are ['count', 'far'" in capsys.readouterr().err
    assert main(["tools", "mcp", str(config_file), "far"]) == 2
    assert "give the agent http://tools:8000/mcp" in capsys.readouterr().err


@pytest.fixture
def http_url(config_file: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = config_file.with_name("server.log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", HTTP, str(port)],
            stdout=out,
            stderr=out,
            env=os.environ | {"PYTHONPATH": str(config_file.parent)},
        )
    deadline = time.monotonic() + WAIT_S
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(POLL_S)
    yield f"http://127.0.0.1:{port}/mcp"
    process.terminate()
    assert process.wait(WAIT_S) in (0, -15), log.read_text()
    assert "Traceback" not in log.read_text()


async def test_a_tool_with_state_over_http_is_one_state_per_client(http_url: str):
    async with Client(http_url) as one, Client(http_url) as other:
        assert text(await one.call_tool("count", {})) == "1"
        assert text(await one.call_tool("count", {})) == "2"
        assert text(await other.call_tool("count", {})) == "1"


async def test_a_tool_of_ours_served_over_mcp_can_be_attached_as_an_mcp_tool(http_url: str):
    tool = McpTool(url=http_url, tool="count", isolation="rollout")
    assert isinstance(tool.spec(), ToolSpec)
    await tool.start()
    from agent_r1.tools.base import CallContext

    await tool.open("a", None)
    await tool.open("b", None)
    for rollout, counted in (("a", "1"), ("a", "2"), ("b", "1")):
        result = await tool.call({}, CallContext(rollout, 0, None, 20.0))
        assert result.text() == counted
    await tool.close("a")
    await tool.close("b")
    await tool.stop()
