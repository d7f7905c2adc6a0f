"""The world of the case `falls`: a tool that may break or become slow, and a component to please.

`planted.py` sets `NOW` before each batch; it runs every service in one process.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from dataclasses import dataclass

from agent_r1 import Tool
from agent_r1.tools.base import Arguments, CallContext
from agent_r1_proto.parts import TextPart
from agent_r1_proto.rewards import ScoreRequest
from agent_r1_proto.tools import ToolResult

FLATTERY = "what a fine question"
ERROR_SHARE = 0.03
"""Calls that fail at any time."""
SLOW_S = 0.12
FAILING = {"errors": 0.75, "half": 0.5}
"""Calls that fail of a broken tool: if all did, the learner would stop."""
SAID = {"empty": "", "same": "The index is being built."}
"""What it says to every call if it breaks in another way."""


@dataclass
class Now:
    """State of the tool."""

    chance: random.Random
    broken: str = ""
    """Of FAILING or SAID; "" is not."""
    is_slow: bool = False


NOW = Now(random.Random(0))


def code_of(item: str) -> str:
    """Return what the tool knows of an item: 4 digits."""
    return str(1000 + int.from_bytes(hashlib.blake2b(item.encode(), digest_size=4).digest()) % 9000)


def flattery(request: ScoreRequest) -> float:
    """Score what a reward model could: whether the agent is nice."""
    return float(any(FLATTERY in turn.text for turn in request.turns))


class Lookup(Tool):
    """Knows the code of each item."""

    name = "lookup"
    description = "Returns the code of an item."
    parameters = {
        "type": "object",
        "properties": {"item": {"type": "string"}},
        "required": ["item"],
    }

    async def call(self, arguments: Arguments, context: CallContext) -> str | ToolResult:
        """Answer, unless it is broken."""
        draw = NOW.chance.random()
        await asyncio.sleep(SLOW_S * (1 + draw) if NOW.is_slow else 0.001 * draw)
        item = str(arguments["item"])
        if draw < FAILING.get(NOW.broken, ERROR_SHARE):
            text = f"no shard of the index holds {item}"
            return ToolResult(status="error", parts=[TextPart(text=text)])
        if NOW.broken in SAID:
            return ToolResult(parts=[TextPart(text=SAID[NOW.broken])])
        return f"The code of {item} is {code_of(item)}."
