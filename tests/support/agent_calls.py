"""Calls of the service that runs agents, as a gateway makes them."""

from __future__ import annotations

import textwrap
from typing import Any

from agent_r1.tools.agents.tool import AgentTool
from agent_r1.tools.base import CallContext
from agent_r1_proto.agents import AgentEnd
from tests.support.model_gateway import KEY

UNREACHABLE = "http://127.0.0.1:9/sessions/s1/v1"


def attempt(url: str = UNREACHABLE, *, prompt: str = "Capital?", timeout_s: float = 60.0) -> Any:
    """Return the `tool_context` of a call."""
    task = {"id": "q1", "prompt": [{"role": "user", "content": prompt}], "metadata": {"level": 3}}
    model = {"model": "policy", "context": 4096}
    return {"task": task, "url": url, "key": KEY, **model, "timeout_s": timeout_s}


async def run(tool: AgentTool, context: Any, rollout_id: str = "r/0/0/0/0") -> AgentEnd:
    """Make an attempt and close it."""
    try:
        return await call(tool, context, rollout_id)
    finally:
        await tool.close(rollout_id)


async def call(tool: AgentTool, context: Any, rollout_id: str = "r/0/0/0/0") -> AgentEnd:
    """Make an attempt, and leave it open."""
    result = await tool.call({}, CallContext(rollout_id, 0, context, 60.0))
    return AgentEnd.model_validate(result.data)


def python(code: str) -> list[str]:
    """Return a command that runs a program."""
    return ["python", "-c", textwrap.dedent(code)]
