"""The kinds of environment, and how `env.type` names one."""

from __future__ import annotations

import inspect
from typing import Any

from agent_r1.rollout.envs.base import CallResult, CallStatus, EnvStep, ModelTurn, ToolEnv
from agent_r1.rollout.envs.code_env import CodeEnv
from agent_r1.rollout.envs.math_env import MathEnv
from agent_r1.runtime.user_code import check_methods, import_named

__all__ = [
    "BUILTIN_ENVS",
    "CallResult",
    "CallStatus",
    "EnvStep",
    "ModelTurn",
    "ToolEnv",
    "load_env_class",
]

BUILTIN_ENVS: dict[str, type[ToolEnv]] = {"tool": ToolEnv, "math": MathEnv, "code": CodeEnv}
"""Environments that come with the system, by the name `env.type` gives them."""


def load_env_class(
    env_type: str, option_names: set[str] | frozenset[str] = frozenset()
) -> type[ToolEnv]:
    """Return the class that `env.type` names: built in, or `module:Name` of a ToolEnv subclass.

    Raises:
        ValueError: there is no such class, it is no ToolEnv, or it does not take the options.
    """
    found: Any = BUILTIN_ENVS.get(env_type) or import_named(env_type, f"env.type ({env_type})")
    if not (isinstance(found, type) and issubclass(found, ToolEnv)):
        raise ValueError(f"env.type ({env_type}) must be a subclass of agent_r1.ToolEnv")
    check_methods(found, f"env.type ({env_type})", {"step": ("turn", "results"), "close": ()})
    try:
        inspect.signature(found).bind(None, **dict.fromkeys(option_names))
    except TypeError as exc:
        given = ", ".join(sorted(option_names)) or "none"
        raise ValueError(f"env.options ({given}) do not fit env.type ({env_type}): {exc}") from exc
    return found
