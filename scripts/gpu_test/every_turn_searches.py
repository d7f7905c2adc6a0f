"""How the diagnosis has a random model call tools: an `env.tool_format`."""

from __future__ import annotations

from agent_r1.text.tool_formats import HERMES, CallBlock, ParsedCall, ToolFormat

QUERY_CHARS = 40


class EveryTurnSearches(ToolFormat):
    """Reads a turn that holds no call as a search for its first characters."""

    example, trace = HERMES.example, HERMES.trace

    def find(self, text: str, start: int) -> CallBlock | None:
        """Return the call that was written, else the whole turn as one."""
        found = HERMES.find(text, start)
        if found is not None or start > 0 or not text:
            return found
        call = ParsedCall("search", {"query": text[:QUERY_CHARS]}, end=len(text))
        return CallBlock(0, len(text), [call])
