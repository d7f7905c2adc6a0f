"""The formats of tool calls, and how `env.tool_format` names one."""

from __future__ import annotations

from typing import Any

from agent_r1.runtime.user_code import import_named
from agent_r1.text.tool_formats.base import CallBlock, NoCalls, ParsedCall, ToolFormat
from agent_r1.text.tool_formats.hermes import HermesFormat
from agent_r1.text.tool_formats.llama3_json import Llama3JsonFormat
from agent_r1.text.tool_formats.mistral import MistralFormat

__all__ = [
    "BUILTIN_FORMATS",
    "HERMES",
    "NO_CALLS",
    "CallBlock",
    "ParsedCall",
    "ToolFormat",
    "load_tool_format",
]

HERMES = HermesFormat()
NO_CALLS = NoCalls()
BUILTIN_FORMATS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "llama3_json": Llama3JsonFormat(),
    "mistral": MistralFormat(),
}
"""Formats that come with the system, by the name `env.tool_format` gives them."""


def load_tool_format(name: str) -> ToolFormat:
    """Return the format that `env.tool_format` names: built in, or `module:Name` of a subclass.

    Raises:
        ValueError: there is no such class, it is no ToolFormat, or it lacks something.
    """
    if name in BUILTIN_FORMATS:
        return BUILTIN_FORMATS[name]
    label = f"env.tool_format ({name})"
    found: Any = import_named(name, label)
    if not (isinstance(found, type) and issubclass(found, ToolFormat)):
        raise ValueError(f"{label} must be a subclass of agent_r1.ToolFormat")
    for attribute in ("example", "trace"):
        if not isinstance(getattr(found, attribute, None), str):
            raise ValueError(f"{label} lacks the text {attribute!r}; set it on the class")
    try:
        return found()
    except TypeError as exc:
        raise ValueError(f"{label} cannot be made without arguments: {exc}") from exc
