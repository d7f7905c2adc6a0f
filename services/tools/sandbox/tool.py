"""What the tools that run the model's code share: one argument, `code`, and a pool of sandboxes."""

from __future__ import annotations

from typing import Generic

from pydantic import JsonValue

from agent_r1.tools.base import Tool
from agent_r1.tools.sandbox.pool import SandboxPool
from agent_r1.tools.sandbox.settings import S, parse_settings

ANSWER_MARGIN_S = 0.5
"""Part of a call's time kept for the way back."""
RUN_ATTEMPTS = 2
"""Runs of code that ends its sandbox: the first time something else may have killed it."""


class SandboxTool(Tool, Generic[S]):
    """A tool that runs Python in a sandbox.

    Args:
        settings: fields of `settings_class`.

    Raises:
        ValueError: a setting is unknown or wrong.
    """

    settings_class: type[S]
    parameters = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "A whole Python program."}},
        "required": ["code"],
        "additionalProperties": False,
    }

    def __init__(self, **settings: JsonValue) -> None:
        self.settings = parse_settings(self.name, self.settings_class, settings)
        self._pool = SandboxPool(self.settings)

    async def start(self) -> None:
        """Start the sandboxes.

        Raises:
            ValueError: none can run here; the text says what to do.
        """
        await self._pool.start()

    async def stop(self) -> None:
        """End the sandboxes."""
        await self._pool.stop()
