"""Builds a tool from its table, and says what the model reads about it.

main.py serves what this loads; the checks before a start only ask for the description, so nothing
here imports a web server or Redis.
"""

from __future__ import annotations

import inspect

from agent_r1.runtime.user_code import describe, import_named
from agent_r1.tools.base import Tool
from agent_r1.tools.config import BUILTIN_TOOLS, ToolConfig
from agent_r1.tools.function import tool_class_of
from agent_r1.tools.search.config import SearchConfig
from agent_r1.tools.search.tool import SearchTool, open_search_tool
from agent_r1_proto.tools import ToolSpec


def describe_tool(name: str, config: ToolConfig) -> ToolSpec:
    """Return what the model reads about the tool of one table; a search index is not opened.

    Raises:
        ValueError: the class or its settings are wrong, or an MCP server does not answer.
    """
    if not isinstance(config, SearchConfig):
        return load_tool(name, config).spec()
    return ToolSpec(
        name=name, version="1", description=config.description, parameters=SearchTool.parameters
    )


def load_tool(name: str, config: ToolConfig) -> Tool:
    """Build the tool of one table.

    Raises:
        ValueError: the corpus, the class or its settings are wrong.
    """
    if isinstance(config, SearchConfig):
        return open_search_tool(name, config)
    tool = _load_class(name, config)
    if config.type in BUILTIN_TOOLS:
        tool.name = name  # two tables may run the same built-in tool with other settings
    if tool.spec().name != name:
        raise ValueError(
            f"[tools.{name}] serves {config.type}, whose name is {tool.name!r}; call the table "
            f"[tools.{tool.name}] or set the class attribute name = {name!r}"
        )
    return tool


def _load_class(name: str, config: ToolConfig) -> Tool:
    found = import_tool_class(BUILTIN_TOOLS.get(config.type, config.type), f"tools.{name}.type")
    given = ", ".join(config.settings) or "none"  # not their values: there may be a key among them
    try:
        inspect.signature(found).bind(**config.settings)
    except TypeError as exc:
        raise ValueError(
            f"tools.{name}.settings ({given}) do not fit {found.__name__}: {exc}; they "
            "are the keyword arguments of the class"
        ) from exc
    try:
        return found(**config.settings)
    except Exception as exc:
        if config.type in BUILTIN_TOOLS and isinstance(exc, ValueError):
            raise  # it says what to set
        raise ValueError(
            f"tools.{name}: {found.__name__}(...) raised {describe(exc)}; correct "
            f"tools.{name}.settings ({given}) or the class"
        ) from exc


def import_tool_class(name: str, key: str) -> type[Tool]:
    """Import `module:Name`, the value of a key: a class, or a function with `@tool`.

    Raises:
        ValueError: there is no such thing, or it is not a tool.
    """
    found = import_named(name, f"{key} ({name})")
    of_function = tool_class_of(found)
    if of_function is not None:
        return of_function
    if inspect.isfunction(found):
        raise ValueError(
            f"{key} ({name}) is a function without the decorator; write @agent_r1.tool above it"
        )
    if not (isinstance(found, type) and issubclass(found, Tool)):
        raise ValueError(
            f"{key} ({name}) is not a subclass of agent_r1.Tool; derive it from Tool, or write a "
            "function with @agent_r1.tool"
        )
    return found
