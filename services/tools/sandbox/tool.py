"""Base of the tools that run the model's code: one argument, `code`, and a pool of sandboxes.

A program's own time (`wall_s`, `total_s`) begins when it has a sandbox. A call therefore waits for
one only as long as all of that time is left afterwards; then it is sent back (`ToolBusyError`), and
rollout sends it again. So no program becomes an outage by hanging.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import JsonValue

from agent_r1.sandbox.checks import BYTE_ORDER_MARK
from agent_r1.sandbox.pool import SandboxPool
from agent_r1.sandbox.settings import SandboxSettings
from agent_r1.tools.base import (
    Arguments,
    CallContext,
    Tool,
    ToolBusyError,
    ToolUnavailableError,
    parse_settings,
)

S = TypeVar("S", bound=SandboxSettings)

ANSWER_MARGIN_S = 0.5
"""Part of a call's time kept for the way back."""
START_MARGIN_S = 2.0
"""Part of a call's time kept for a sandbox that is still starting."""
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
        self.settings = parse_settings(self.settings_class, settings)
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


def read_code(arguments: Arguments) -> str:
    """Return the argument `code`, without a byte order mark."""
    return str(arguments["code"]).removeprefix(BYTE_ORDER_MARK)


def find_wait_s(context: CallContext, limit_s: float) -> float:
    """Return how long a call may wait for a place, so that `limit_s` is left for its program."""
    left_s = context.timeout_s - ANSWER_MARGIN_S
    return left_s if left_s < limit_s else max(0.0, left_s - limit_s - START_MARGIN_S)


def explain_short_time(context: CallContext, name: str, limit_s: float) -> ToolUnavailableError:
    """Return why a program did not have the `limit_s` that the setting `name` gives it."""
    if context.timeout_s - ANSWER_MARGIN_S >= limit_s:
        return ToolBusyError(
            f"waiting for a sandbox left less than {name} ({limit_s:g} s) of the call's time; "
            "raise max_workers of this tool or start more instances of it"
        )
    return ToolUnavailableError(
        f"the call's time ({context.timeout_s:.1f} s) ends before {name} ({limit_s:g} s) does; "
        f"raise env.tool_timeout_s or lower {name}"
    )
