"""`agent-r1 tools mcp CONFIG TOOL`: one tool of a configuration as an MCP server over stdio.

An MCP agent starts this command and talks to it over its standard input and output; logs go to
standard error. A tool service that runs already has the same under its URL + `/mcp`.
"""

from __future__ import annotations

import argparse
import asyncio

from agent_r1.cli.training.run import configure_logging
from agent_r1.config import checks as config_checks
from agent_r1.config.run import ConfigError, load_config


def serve_mcp(arguments: argparse.Namespace) -> int:
    """Serve `arguments.tool` of `arguments.config` until the client goes away.

    Raises:
        ConfigError: the configuration has no such tool, or one that runs elsewhere.
        ValueError: the tool cannot be built; the text says what to do.
    """
    config = load_config(arguments.config, arguments.options).config
    name: str = arguments.tool
    if name not in config.tools:
        raise ConfigError(f"there is no [tools.{name}]; the tools are {sorted(config.tools)}")
    table = config.tools[name]
    if table.url is not None:
        raise ConfigError(
            f"tools.{name}.url ({table.url}) names a service that already runs; give the agent "
            f"{table.url.rstrip('/')}/mcp (streamable HTTP), or remove url to serve it here"
        )
    configure_logging(config.run, arguments.tool)
    config_checks.use_plugins(config)
    from agent_r1.tools.app import ToolService
    from agent_r1.tools.loading import load_tool
    from agent_r1.tools.mcp.server import serve_stdio

    async def serve() -> None:
        await serve_stdio(ToolService(load_tool(name, table), f"{name}-stdio", table))

    asyncio.run(serve())
    return 0
