"""The kinds of environment, and how `env.type` names one."""

from __future__ import annotations

import importlib
import inspect

from agent_r1.rollout.envs.base import CallResult, CallStatus, EnvStep, ModelTurn
from agent_r1.rollout.envs.tool_env import ToolEnv

__all__ = ["CallResult", "CallStatus", "EnvStep", "ModelTurn", "ToolEnv", "load_env_class"]


def load_env_class(
    env_type: str, option_names: set[str] | frozenset[str] = frozenset()
) -> type[ToolEnv]:
    """Return the class that `env.type` names: `tool`, or `module:Name` of a ToolEnv subclass.

    Raises:
        ValueError: there is no such class, it is no ToolEnv, or it does not take the options.
    """
    if env_type == "tool":
        return ToolEnv
    module_name, _, name = env_type.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        raise ValueError(
            f"env.type ({env_type}): module {module_name!r} cannot be imported: {exc}; put its "
            "folder into run.plugins"
        ) from exc
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, ToolEnv)):
        raise ValueError(
            f"env.type ({env_type}): {name!r} of {module_name!r} must be a subclass of "
            "agent_r1.ToolEnv"
        )
    try:
        inspect.signature(found).bind(None, **dict.fromkeys(option_names))
    except TypeError as exc:
        given = ", ".join(sorted(option_names)) or "none"
        raise ValueError(f"env.options ({given}) do not fit env.type ({env_type}): {exc}") from exc
    return found
