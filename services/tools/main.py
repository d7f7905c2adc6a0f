"""Starts one tool service: builds the tool, binds, announces itself, drains on SIGTERM.

`cli/services/serve.py` calls `serve` with the tables of one run; rollout calls the service.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from agent_r1.runtime.announcements import withdraw_announcement
from agent_r1.runtime.config import RedisConfig, RunConfig
from agent_r1.runtime.http.serving import serve_app
from agent_r1.runtime.http.token import RunToken
from agent_r1.tools.agents.attached import AttachedAgents, add_attempts
from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.config import ToolConfig
from agent_r1.tools.loading import load_tool
from agent_r1.tools.mcp.route import mcp_router
from agent_r1.tools.registration import Announcer
from agent_r1.tools.search.retrieve import add_retrieve
from agent_r1.tools.search.tool import SearchTool
from agent_r1_proto.agents import AGENTS
from agent_r1_proto.connection import RedisConnection
from agent_r1_proto.registry import ToolRegistry

logger = logging.getLogger(__name__)


def serve(
    *,
    name: str,
    run: RunConfig,
    redis: RedisConfig,
    tool: ToolConfig,
    token: RunToken | None,
    announce_dir: Path | None,
    say: Callable[[str], None] = logger.info,
) -> None:
    """Serve the tool `[tools.<name>]` until SIGTERM or SIGINT.

    Every request must have `token`; None lets all in. With `redis.url` the instance announces
    itself in the tool pool; without, callers must know its URL. `say` is called with one line about
    that once the tool answers.

    Raises:
        ValueError: the table, the corpus or the user's class is wrong; the text says what to do.
    """
    if tool.url is not None:
        raise ValueError(
            f"tools.{name}.url ({tool.url!r}) names a service that already runs; remove url to "
            "serve the tool here"
        )
    asyncio.run(_serve(name, run, redis, tool, token, announce_dir, say))


async def _serve(
    name: str,
    run: RunConfig,
    redis: RedisConfig,
    config: ToolConfig,
    token: RunToken | None,
    announce_dir: Path | None,
    say: Callable[[str], None],
) -> None:
    instance = f"{name}-{socket.gethostname()}-{os.getpid()}"
    served = load_tool(name, config)
    service = ToolService(served, instance, config)
    app = create_app(service)
    app.include_router(mcp_router(service, session_expiry_s=config.session_expiry_s))
    if isinstance(served, SearchTool):
        add_retrieve(app, served)
    if isinstance(served, AttachedAgents):
        add_attempts(app, served)
    logger.info(
        "tool serves tool=%s version=%s instance=%s run_id=%s",
        name,
        service.spec.version,
        instance,
        run.id,
    )
    spec = service.spec
    key = "agent.url" if name == AGENTS else f"tools.{name}.url"
    serve_it = partial(
        serve_app, app, name=name, listen=config, token=token, announce_dir=announce_dir
    )
    if redis.url is None:
        await serve_it(
            before_stop=lambda: service.drain(config.drain_timeout_s),
            on_up=lambda url: say(
                f"tool {spec.name} {spec.version} serves at {url}, but is not announced: redis.url "
                f"is not set, so callers need its address ({key})"
            ),
        )
        return
    where = f" (Redis at {_address(redis.url)})"
    async with await RedisConnection.connect(redis.connection_url(), run.id) as connection:
        registry = ToolRegistry(connection, run.tool_pool or run.id)
        announcer = Announcer(registry, service, say=lambda line: say(line + where))
        await _serve_announced(announcer, service, config.drain_timeout_s, serve_it)
    if announcer.told_to_drain and announce_dir is not None:
        withdraw_announcement(announce_dir, name)


async def _serve_announced(
    announcer: Announcer,
    service: ToolService,
    drain_timeout_s: float,
    serve_it: Callable[..., Awaitable[None]],
) -> None:
    """Serve, announced, until told to stop; what ends the announcing is raised."""
    announcing = asyncio.create_task(announcer.run())

    async def leave() -> None:
        alone = announcing.done() or not announcer.up.is_set()
        await (service if alone else announcer).drain(drain_timeout_s)

    try:
        await serve_it(before_stop=leave, until=announcing, on_up=announcer.announce)
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
    if not announcing.cancelled():
        announcing.result()  # raises what ended it


def _address(redis_url: str) -> str:
    """Return where a Redis is, without its password."""
    parts = urlsplit(redis_url)
    return parts.path if parts.hostname is None else f"{parts.hostname}:{parts.port or 6379}"
