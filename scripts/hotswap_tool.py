"""The search tool of tiny_world in a version of choice, for scripts/hotswap.py."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

from agent_r1.tools.base import Arguments, CallContext
from agent_r1.tools.search.config import SearchConfig
from agent_r1.tools.search.tool import SearchTool, open_backend
from agent_r1_proto.tools import ToolResult


class VersionedSearch(SearchTool):
    """Answers as the search tool of a configuration does, under another version, a little later."""

    def __init__(self, config: str, corpus: str, version: str, delay_s: float) -> None:
        table = tomllib.loads(Path(config).read_text(encoding="utf-8"))["tools"]["search"]
        tool = SearchConfig(**(table | {"corpus": corpus}))
        super().__init__("search", tool, open_backend(tool))
        self.version = version
        self._delay_s = delay_s

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult:
        """Search."""
        await asyncio.sleep(self._delay_s)
        return await super().call(arguments, context)
