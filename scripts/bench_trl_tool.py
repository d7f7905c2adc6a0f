"""tiny_world's search behind a latency of bench_trl.py; the run of ours loads it as a plugin."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_trl_cells import latencies

from agent_r1.tools.base import Arguments, CallContext, Tool
from agent_r1.tools.search.config import SearchConfig

if TYPE_CHECKING:
    from agent_r1_proto.tools import ToolResult


class DelayedSearch(Tool):
    """Waits, then searches."""

    name = "search"
    description = "Searches an encyclopedia and returns the passages that match best."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, corpus: str, latency: str) -> None:
        from agent_r1.tools.search.tool import open_search_tool

        # As in examples/tiny_world/run.toml.
        config = SearchConfig(
            corpus=Path(corpus), top_k=2, passage_template=" {text}", separator="\n"
        )
        self._search: Any = open_search_tool("search", config)
        self._latencies = latencies(latency)

    async def start(self) -> None:
        """Start the search."""
        await self._search.start()

    async def stop(self) -> None:
        """Stop the search."""
        await self._search.stop()

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult | str:
        """Wait, then search."""
        await asyncio.sleep(next(self._latencies))
        return await self._search.call(arguments, context)
