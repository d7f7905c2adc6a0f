"""The search tool of tiny_world in a version of choice, for scripts/hotswap.py."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

from agent_r1 import Tool
from agent_r1.tools.config import ToolConfig
from agent_r1.tools.search.tool import open_search_tool


class VersionedSearch(Tool):
    """Answers as the search tool of a configuration does, under another version, a little later."""

    def __init__(self, config: str, corpus: str, version: str, delay_s: float) -> None:
        table = tomllib.loads(Path(config).read_text(encoding="utf-8"))["tools"]["search"]
        self._search = open_search_tool("search", ToolConfig(**(table | {"corpus": corpus})))
        self._delay_s = delay_s
        self.name = "search"
        self.description = self._search.description
        self.parameters = self._search.parameters
        self.version = version

    async def start(self) -> None:
        """Open the index."""
        await self._search.start()

    async def stop(self) -> None:
        """Close it."""
        await self._search.stop()

    async def call(self, arguments, context):
        """Search."""
        await asyncio.sleep(self._delay_s)
        return await self._search.call(arguments, context)
