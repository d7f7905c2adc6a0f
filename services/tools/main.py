"""Starts one tool service: builds the tool, binds, announces itself, drains on SIGTERM.

`agent_r1.cli.main` calls `serve` with the tables of one run; rollout calls the service.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import FastAPI

from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.base import Tool
from agent_r1.tools.config import BUILTIN_TOOLS, ToolConfig
from agent_r1.tools.mcp.server import mcp_router
from agent_r1.tools.registration import Announcer
from agent_r1.tools.results import describe_exception
from agent_r1.tools.search.tool import SearchTool, add_retrieve, open_search_tool
from agent_r1_proto.connection import RedisConnection
from agent_r1_proto.registry import ToolRegistry
from agent_r1_proto.tool_pool import ToolInstance
from agent_r1_service.announcements import withdraw_announcement
from agent_r1_service.config import RedisConfig, RunConfig
from agent_r1_service.http.serving import serve_app
from agent_r1_service.http.token import RunToken, find_token
from agent_r1_service.user_code import import_named

logger = logging.getLogger(__name__)


def serve(
    *,
    name: str,
    run: RunConfig,
    redis: RedisConfig,
    tool: ToolConfig,
    announce_dir: Path | None,
    say: Callable[[str], None] = logger.info,
) -> None:
    """Serve the tool `[tools.<name>]` until SIGTERM or SIGINT.

    With `redis.url` the instance announces itself in the tool pool; without, callers must know
    its URL. `say` is called with one line about that once the tool answers.

    Raises:
        ValueError: the table, the corpus or the user's class is wrong; the text says what to do.
    """
    if tool.url is not None:
        raise ValueError(
            f"tools.{name}.url ({tool.url!r}) names a service that already runs; remove url to "
            "serve the tool here"
        )
    asyncio.run(_serve(name, run, redis, tool, announce_dir, say))


async def _serve(
    name: str,
    run: RunConfig,
    redis: RedisConfig,
    config: ToolConfig,
    announce_dir: Path | None,
    say: Callable[[str], None],
) -> None:
    instance = f"{name}-{socket.gethostname()}-{os.getpid()}"
    served = load_tool(name, config)
    app = create_app(
        served,
        instance=instance,
        session_expiry_s=config.session_expiry_s,
        max_calls_in_flight=config.max_calls_in_flight,
        max_result_bytes=config.max_result_bytes,
    )
    service: ToolService = app.state.service
    app.include_router(mcp_router(service, session_expiry_s=config.session_expiry_s))
    if isinstance(served, SearchTool):
        add_retrieve(app, served, config.top_k)
    logger.info(
        "tool serves tool=%s version=%s instance=%s run_id=%s",
        name,
        service.spec.version,
        instance,
        run.id,
    )
    async with AsyncExitStack() as stack:
        registry: ToolRegistry | None = None
        where = ""
        if redis.url is not None:
            broker = await RedisConnection.connect(redis.connection_url(), run.id)
            stack.push_async_callback(broker.close)
            registry = ToolRegistry(broker, run.tool_pool or run.id)
            where = f" (Redis at {_address(redis.url)})"
        await _Serving(name, config, app, instance, registry, lambda line: say(line + where)).run(
            find_token(run), announce_dir
        )


def _address(redis_url: str) -> str:
    """Return where a Redis is, without its password."""
    parts = urlsplit(redis_url)
    return parts.path if parts.hostname is None else f"{parts.hostname}:{parts.port or 6379}"


class _Serving:
    """A tool that serves and, where there is a registry, is kept announced in it."""

    def __init__(
        self,
        name: str,
        config: ToolConfig,
        app: FastAPI,
        instance: str,
        registry: ToolRegistry | None,
        say: Callable[[str], None],
    ) -> None:
        self._name = name
        self._config = config
        self._app = app
        self._service: ToolService = app.state.service
        self._instance = instance
        self._registry = registry
        self._say = say
        self._announcer: Announcer | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, token: RunToken | None, announce_dir: Path | None) -> None:
        """Serve until told to stop; what ends the announcing is raised."""
        try:
            await serve_app(
                self._app,
                name=self._name,
                listen=self._config,
                token=token,
                announce_dir=announce_dir,
                before_stop=self._leave,
                until=self._ended,
                on_up=self._announce,
            )
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._announcing is not None and not self._announcing.cancelled():
            self._announcing.result()  # raises what ended it
        drained = self._announcer is not None and self._announcer.told_to_drain
        if drained and announce_dir is not None:
            withdraw_announcement(announce_dir, self._name)

    def _announce(self, url: str) -> None:
        spec = self._service.spec
        if self._registry is None:
            self._say(
                f"tool {spec.name} {spec.version} serves at {url}, but is not announced: redis.url "
                f"is not set, so callers need its address (tools.{spec.name}.url)"
            )
            return
        announced = ToolInstance(
            instance=self._instance,
            url=url,
            spec=spec,
            capacity=self._config.max_calls_in_flight,
            pid=os.getpid(),
            host=socket.gethostname(),
            started_at=time.time(),
        )
        self._announcer = Announcer(
            self._registry,
            self._service,
            announced,
            expiry_s=self._config.announce_expiry_s,
            new_version=self._config.new_version,
        )
        self._announcing = asyncio.create_task(self._announcer.run())
        self._announcing.add_done_callback(
            lambda _: self._ended.done() or self._ended.set_result(None)
        )
        saying = asyncio.create_task(self._say_where(self._announcer, url))
        self._tasks = [self._announcing, saying]

    async def _say_where(self, announcer: Announcer, url: str) -> None:
        await announcer.announced.wait()
        self._say(f"tool {self._service.spec.name} serves at {url}, {await announcer.describe()}")

    async def _leave(self) -> None:
        if self._announcer is None or (self._announcing is not None and self._announcing.done()):
            await self._service.drain(self._config.drain_timeout_s)
        else:
            await self._announcer.leave(self._config.drain_timeout_s)


def load_tool(name: str, config: ToolConfig) -> Tool:
    """Build the tool of one table.

    Raises:
        ValueError: the corpus, the class or its settings are wrong.
    """
    if config.type == "search":
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
    try:
        inspect.signature(found).bind(**config.settings)
    except TypeError as exc:
        raise ValueError(
            f"tools.{name}.settings ({config.settings}) do not fit {found.__name__}: {exc}; they "
            "are the keyword arguments of the class"
        ) from exc
    try:
        return found(**config.settings)
    except Exception as exc:
        if config.type in BUILTIN_TOOLS and isinstance(exc, ValueError):
            raise  # it says what to set
        raise ValueError(
            f"tools.{name}: {found.__name__}(...) raised {describe_exception(exc)}; correct "
            f"tools.{name}.settings ({config.settings}) or the class"
        ) from exc


def import_tool_class(name: str, key: str) -> type[Tool]:
    """Import `module:Name`, the value of a key.

    Raises:
        ValueError: there is no such thing, or it is not a tool.
    """
    found = import_named(name, f"{key} ({name})")
    if not (isinstance(found, type) and issubclass(found, Tool)):
        raise ValueError(f"{key} ({name}) is not a subclass of agent_r1.Tool; derive it from Tool")
    return found
