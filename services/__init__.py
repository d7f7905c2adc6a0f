"""Names that user code builds on: `from agent_r1 import Tool, ToolEnv`; and `agent_r1.train`.

Names are loaded when they are first asked for, so that importing `agent_r1` costs nothing and never
brings in torch or vllm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent_r1.cli.api import RunStoppedError, evaluate, train
    from agent_r1.reward.trl import trl_reward
    from agent_r1.rollout.envs import CallResult, EnvStep, ModelTurn, ToolEnv
    from agent_r1.runs.run import Run, load_run
    from agent_r1.text.tool_formats import CallBlock, ParsedCall, ToolFormat
    from agent_r1.tools.agents.agent import Agent, Model
    from agent_r1.tools.base import (
        CallContext,
        Tool,
        ToolUnavailableError,
        error_result,
        text_result,
    )
    from agent_r1.tools.function import tool
    from agent_r1_proto.agents import AgentTask
    from agent_r1_proto.parts import ImagePart, TextPart
    from agent_r1_proto.rewards import ScoreCall, ScoreRequest, ScoreTurn
    from agent_r1_proto.tasks import Task
    from agent_r1_proto.tools import ToolResult, ToolSpec

__all__ = [
    "Agent",
    "AgentTask",
    "CallBlock",
    "CallContext",
    "CallResult",
    "EnvStep",
    "ImagePart",
    "Model",
    "ModelTurn",
    "ParsedCall",
    "Run",
    "RunStoppedError",
    "ScoreCall",
    "ScoreRequest",
    "ScoreTurn",
    "Task",
    "TextPart",
    "Tool",
    "ToolEnv",
    "ToolFormat",
    "ToolResult",
    "ToolSpec",
    "ToolUnavailableError",
    "error_result",
    "evaluate",
    "load_run",
    "text_result",
    "tool",
    "train",
    "trl_reward",
]

_HOMES = {
    "agent_r1.cli.api": ("RunStoppedError", "evaluate", "train"),
    "agent_r1.reward.trl": ("trl_reward",),
    "agent_r1.rollout.envs": ("CallResult", "EnvStep", "ModelTurn", "ToolEnv"),
    "agent_r1.runs.run": ("Run", "load_run"),
    "agent_r1.text.tool_formats": ("CallBlock", "ParsedCall", "ToolFormat"),
    "agent_r1.tools.agents.agent": ("Agent", "Model"),
    "agent_r1.tools.base": (
        "CallContext",
        "Tool",
        "ToolUnavailableError",
        "error_result",
        "text_result",
    ),
    "agent_r1.tools.function": ("tool",),
    "agent_r1_proto.agents": ("AgentTask",),
    "agent_r1_proto.rewards": ("ScoreCall", "ScoreRequest", "ScoreTurn"),
    "agent_r1_proto.tasks": ("Task",),
    "agent_r1_proto.parts": ("ImagePart", "TextPart"),
    "agent_r1_proto.tools": ("ToolResult", "ToolSpec"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a name from its module."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'agent_r1' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List what can be imported."""
    return sorted({*globals(), *__all__})
