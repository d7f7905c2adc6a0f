"""Tools of benchmarks: their own work is little or a wait, so what is measured is around them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

from agent_r1 import Tool
from agent_r1.tools.base import Arguments, CallContext
from agent_r1.tools.search.config import SearchConfig
from agent_r1.tools.search.tool import SearchTool, open_backend
from agent_r1_proto.tools import ToolResult

WORLD = Path(__file__).resolve().parents[2] / "examples" / "tiny_world"


class Shout(Tool):
    """Answers at once."""

    name = "shout"
    description = "Repeats a text in capitals."
    parameters = {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    }
    max_batch = 64  # as the search tool; calls of one request are answered together

    async def call(self, arguments: Arguments, context: CallContext) -> str:
        """Repeat."""
        return str(arguments["text"]).upper()


class TwoPassages(Tool):
    """Two passages chosen by the query's hash, `tool_context` seconds after it was asked."""

    name = "search"
    description = "Answers every query with two passages."
    parameters = SearchTool.parameters

    def __init__(self) -> None:
        with (WORLD / "data" / "corpus.jsonl").open(encoding="utf-8") as file:
            self._texts = [json.loads(line)["text"] for line in file]

    async def call(self, arguments: Arguments, context: CallContext) -> str:
        """Wait, then answer."""
        if isinstance(context.tool_context, float) and context.tool_context > 0:
            await asyncio.sleep(context.tool_context)
        digest = hashlib.blake2b(str(arguments["query"]).encode(), digest_size=8).digest()
        first = int.from_bytes(digest) % (len(self._texts) - 1)
        return "\n".join(f" {text}" for text in self._texts[first : first + 2])


class SlowSearch(SearchTool):
    """The search tool of tiny_world behind a wait, in a version of choice.

    Args:
        corpus: File of passages.
        waits_s: Seconds that call after call takes, again from the start after the last.
        version: Announced.
    """

    def __init__(self, corpus: str, waits_s: Sequence[float], version: str = "1") -> None:
        table = tomllib.loads((WORLD / "run.toml").read_text(encoding="utf-8"))["tools"]["search"]
        tool = SearchConfig(**(table | {"corpus": corpus}))
        super().__init__("search", tool, open_backend(tool))
        self.version = version
        self._waits_s = itertools.cycle(waits_s)

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult:
        """Wait, then search."""
        await asyncio.sleep(next(self._waits_s))
        return await super().call(arguments, context)
