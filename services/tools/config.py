"""`[tools.<name>]`: one tool, where it runs and how it is set up.

Read by `main.py` (a tool this run starts) and by cli/training/train.py (its URL, for rollout).
kinds.py says which class checks a table: one that holds its keys, or this one.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.user_code import CODE_PATTERN

SEARCH = "search"
BUILTIN_TOOLS = {
    SEARCH: "agent_r1.tools.search.tool:SearchTool",
    "calculator": "agent_r1.tools.calculator:Calculator",
    "python_exec": "agent_r1.tools.sandbox.python_exec:PythonExec",
    "code_tests": "agent_r1.tools.sandbox.code_tests:CodeTests",
    "mcp": "agent_r1.tools.mcp.client:McpTool",
    "agents": "agent_r1.tools.agents.tool:AgentTool",
    "attached_agents": "agent_r1.tools.agents.attached:AttachedAgents",
}
"""Tools that come with the system, by the name a table's `type` gives them."""


class ToolConfig(ListenConfig):
    """`[tools.<name>]`: what every tool's table has."""

    type: str = SEARCH
    """`search`, `calculator`, `python_exec`, `code_tests`, `mcp`, or `module:Name` of a `Tool`
    subclass found through `run.plugins`."""
    url: str | None = None
    """Base URL of a service that already runs; None starts one with this run."""
    session_expiry_s: Annotated[float, Field(gt=0)] = 600.0
    """A session without calls for this long is closed, in seconds."""
    drain_timeout_s: Annotated[float, Field(ge=0)] = 20.0
    """Longest wait, on shutdown, for calls in flight and open sessions, in seconds."""
    max_calls_in_flight: Annotated[int, Field(ge=1)] = 1024
    """More calls than this at once are answered 503; also the capacity that is announced."""
    announce_expiry_s: Annotated[float, Field(ge=1)] = 5.0
    """An announcement in the tool pool disappears after this many seconds without renewal."""
    max_result_bytes: Annotated[int, Field(ge=256)] = 128 << 10
    """Most bytes (in UTF-8) of one result's text; the rest is cut before it is sent."""
    new_version: Literal["all", "none"] | Annotated[float, Field(gt=0, lt=1)] = "all"
    """Share of new trajectories a version gets when it is first announced beside another: `all`,
    `none`, or a share such as 0.1. Weights that have already been set take precedence."""
    settings: dict[str, JsonValue] = {}
    """Keyword arguments of the tool's class; `search` has keys of its own instead."""

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        foreign = sorted(values.keys() - cls.model_fields) if isinstance(values, dict) else []
        if foreign:
            raise ValueError(
                f"{', '.join(foreign)}: not a key of a tool of type {values.get('type')!r}; what "
                "its class takes goes into settings, as keyword arguments"
            )
        return values

    @model_validator(mode="after")
    def _check_address_and_type(self) -> Self:
        if self.url is not None and not re.match(r"^https?://", self.url):
            raise ValueError(
                f"url ({self.url!r}) must start with http:// or https://; leave it out to "
                "start the tool with this run"
            )
        known = self.type in BUILTIN_TOOLS or re.match(CODE_PATTERN, self.type)
        if self.url is None and not known:
            raise ValueError(
                f"type ({self.type!r}) must be one of {', '.join(BUILTIN_TOOLS)}, or "
                '"module:Name" of a Tool subclass'
            )
        return self
