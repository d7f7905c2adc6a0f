"""Starts one tool service: builds the tool, binds, announces itself, drains on SIGTERM.

`agent_r1.cli` calls `serve` with the tables of one run; rollout calls the service.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
from pathlib import Path

from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.base import Tool
from agent_r1.tools.config import BUILTIN_TOOLS, ToolTable
from agent_r1.tools.search import SearchTool, open_search_tool, retrieve_router
from agent_r1_proto.config import RunTable
from agent_r1_proto.serving import serve_app

logger = logging.getLogger(__name__)


def serve(*, name: str, run: RunTable, tool: ToolTable, announce_dir: Path | None) -> None:
    """Serve the tool `[tools.<name>]` until SIGTERM or SIGINT.

    Raises:
        ValueError: the table, the corpus or the user's class is wrong; the text says what to do.
    """
    if tool.url is not None:
        raise ValueError(
            f"tools.{name}.url ({tool.url!r}) names a service that already runs; remove url to "
            "serve the tool here"
        )
    asyncio.run(_serve(name, run, tool, announce_dir))


async def _serve(name: str, run: RunTable, table: ToolTable, announce_dir: Path | None) -> None:
    instance = f"{name}-{socket.gethostname()}-{os.getpid()}"
    served = load_tool(name, table)
    app = create_app(
        served,
        instance=instance,
        session_expiry_s=table.session_expiry_s,
        max_calls_in_flight=table.max_calls_in_flight,
    )
    service: ToolService = app.state.service
    if isinstance(served, SearchTool):
        app.include_router(retrieve_router(served, table.top_k))
    logger.info(
        "tool serves tool=%s version=%s instance=%s run_id=%s",
        name,
        service.spec.version,
        instance,
        run.id,
    )
    await serve_app(
        app,
        name=name,
        listen=table,
        announce_dir=announce_dir,
        before_stop=lambda: service.drain(table.drain_timeout_s),
    )


def load_tool(name: str, table: ToolTable) -> Tool:
    """Build the tool of one table.

    Raises:
        ValueError: the corpus, the class or its settings are wrong.
    """
    if table.type == "search":
        return open_search_tool(name, table)
    tool = _load_class(name, table)
    if table.type in BUILTIN_TOOLS:
        tool.name = name  # two tables may run the same built-in tool with other settings
    if tool.spec().name != name:
        raise ValueError(
            f"[tools.{name}] serves {table.type}, whose name is {tool.name!r}; call the table "
            f"[tools.{tool.name}] or set the class attribute name = {name!r}"
        )
    return tool


def _load_class(name: str, table: ToolTable) -> Tool:
    module_name, _, class_name = BUILTIN_TOOLS.get(table.type, table.type).partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as exc:
        raise ValueError(
            f"tools.{name}.type ({table.type!r}) cannot be loaded: {exc}; check the name, and that "
            "its folder is in run.plugins"
        ) from exc
    if not (isinstance(found, type) and issubclass(found, Tool)):
        raise ValueError(
            f"tools.{name}.type ({table.type!r}) is not a subclass of agent_r1.Tool; "
            "derive it from Tool"
        )
    try:
        return found(**table.settings)
    except TypeError as exc:
        raise ValueError(
            f"tools.{name}.settings ({table.settings}) do not fit {class_name}: {exc}; they are "
            "the keyword arguments of the class, and `call` must be defined"
        ) from exc
