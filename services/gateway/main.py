"""Starts one gateway: takes samples from the stream, lets agents work on them, serves their wire.

`cli/services/serve.py` calls `serve` with the tables of one run. Tokens come from rollout servers;
agents run in the service that is announced as `agents`; trajectories go to `trajectories`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from agent_r1.attempts.tool_client import ToolClient
from agent_r1.attempts.tool_discovery import ToolDirectory
from agent_r1.attempts.worker import SampleWorker
from agent_r1.gateway.app import create_app, create_wire, error_body
from agent_r1.gateway.attempts import AgentAttempts
from agent_r1.gateway.config import AgentConfig
from agent_r1.gateway.metrics import GatewayMetrics
from agent_r1.gateway.servers import RolloutServers
from agent_r1.gateway.session import SessionRules
from agent_r1.runtime.announcements import make_consumer_name, write_announcement
from agent_r1.runtime.config import ModelConfig, RedisConfig, RunConfig
from agent_r1.runtime.http.serving import (
    advertised_url,
    bind,
    bind_unprotected,
    serving,
    stop_signals,
)
from agent_r1.runtime.http.token import find_token, read_token
from agent_r1.runtime.imports import quick_imports
from agent_r1.text.chat_format import ChatFormat, reply_roles
from agent_r1.text.chat_template import load_tokenizer, read_end_tokens
from agent_r1.text.tool_formats import load_tool_format
from agent_r1_proto.agents import AGENTS
from agent_r1_proto.connection import ROLLOUT_GROUP
from agent_r1_proto.failures import FailureBoard
from agent_r1_proto.registry import Registry, ToolRegistry
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.trajectory import Trajectory

logger = logging.getLogger(__name__)

NAME = "gateway"
WORKER_STOP_TIMEOUT_S = 15.0
RETRIES = 6


@dataclass(frozen=True)
class GatewaySettings:
    """The tables one gateway needs."""

    run: RunConfig
    model: ModelConfig
    redis: RedisConfig
    agent: AgentConfig
    tool_format: str
    """`env.tool_format`."""
    template_kwargs: Mapping[str, JsonValue]
    """`env.chat_template_kwargs`."""
    answer_pattern: str | None
    """`env.answer_pattern`."""
    max_tokens_per_turn: int
    """`env.max_tokens_per_turn`."""
    tools: Mapping[str, str | None]
    """Base URL of every tool that agents may call, by name; None: it announces itself."""
    tool_timeout_s: float
    """`env.tool_timeout_s`."""
    tool_start_timeout_s: float
    """`rollout.tool_start_timeout_s`: for agents and tools to be there."""
    announce_dir: Path | None = None
    """Folder of the launcher's announcements; None writes none."""


def serve(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT; attempts in flight are then given back.

    Raises:
        ValueError: a table or the chat template is wrong, or no agents' service is there.
    """
    asyncio.run(_serve(settings))


def build_chat_format(settings: GatewaySettings) -> ChatFormat:
    """Load the tokenizer; agents may send any dialogue, so rewritten histories are segments.

    Raises:
        ChatTemplateError: the chat template cannot be used.
    """
    folder = Path(settings.model.path)
    return ChatFormat(
        load_tokenizer(str(folder)),
        end_of_turn_ids=read_end_tokens(folder),
        template_kwargs=settings.template_kwargs,
        reply_roles=reply_roles(tools=True, messages=True),
        tool_format=load_tool_format(settings.tool_format),
        segments=True,
    )


def session_rules(settings: GatewaySettings) -> SessionRules:
    """Return the limits of sessions."""
    agent = settings.agent
    return SessionRules(
        run_seed=settings.run.seed,
        max_context=settings.model.max_context,
        max_tokens_per_turn=settings.max_tokens_per_turn,
        max_session_tokens=agent.max_session_tokens,
        max_requests=agent.max_requests,
        max_in_flight=agent.max_in_flight,
        keeps_thoughts=agent.thoughts == "keep",
        allows_constrained=agent.allow_constrained,
        volatile=agent.volatile,
        answer_pattern=settings.answer_pattern,
    )


async def _serve(settings: GatewaySettings) -> None:
    with quick_imports():
        chat = await asyncio.to_thread(build_chat_format, settings)
    with stop_signals() as (stop, _):
        stopped = asyncio.create_task(stop.wait())
        serving_samples = asyncio.create_task(_serve_samples(settings, chat))
        try:
            await asyncio.wait([serving_samples, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            serving_samples.cancel()
            await asyncio.wait([serving_samples])
    if not serving_samples.cancelled():
        serving_samples.result()  # raises what ended it
    logger.info("gateway has stopped run_id=%s", settings.run.id)


async def _serve_samples(settings: GatewaySettings, chat: ChatFormat) -> None:
    """Start the parts, work until cancelled, then stop them in reverse order."""
    run, agent = settings.run, settings.agent
    token = find_token(run)
    async with AsyncExitStack() as stack:
        control = bind(NAME, agent.gateway, token)
        stack.callback(control.close)
        wire = bind_unprotected("agent.wire", agent.wire)  # every session has a key of its own
        stack.callback(wire.close)
        url = advertised_url(NAME, agent.gateway, control.getsockname()[1])
        wire_url = advertised_url("agent.wire", agent.wire, wire.getsockname()[1])
        server_id = f"{NAME}-{socket.gethostname()}-{os.getpid()}"
        broker = await stack.enter_async_context(await _connect(settings))
        registry = Registry(broker)
        tools = _tool_client(settings, broker, server_id)
        stack.push_async_callback(tools.stop)
        await tools.start(settings.tool_start_timeout_s)
        servers = await stack.enter_async_context(RolloutServers(registry, token))
        attempts = AgentAttempts(
            broker=broker,
            chat=chat,
            servers=servers,
            tools=tools,
            agent=agent,
            rules=session_rules(settings),
            server_id=server_id,
            wire_url=wire_url,
        )
        consumer = await stack.enter_async_context(
            broker.consumer(
                broker.keys.tasks,
                RolloutTask,
                group=ROLLOUT_GROUP,
                consumer=make_consumer_name(NAME, settings.announce_dir),
            )
        )
        worker = SampleWorker(
            consumer=consumer,
            registry=registry,
            run_attempt=attempts.run,
            versions=servers,
            trajectories=broker.keys.trajectories,
            max_concurrent=agent.max_concurrent,
            board=FailureBoard(broker),
        )
        metrics = GatewayMetrics(
            servers, in_flight=lambda: worker.in_flight, max_concurrent=agent.max_concurrent
        )
        attempts.on_end = metrics.note_end
        forgetting: set[asyncio.Task[None]] = set()

        def forget(trajectory: Trajectory, published: bool) -> None:
            task = asyncio.create_task(attempts.forget(trajectory))
            forgetting.add(task)
            task.add_done_callback(forgetting.discard)

        worker.on_attempt = forget
        app = create_app(server_id=server_id, servers=servers, in_flight=lambda: worker.in_flight)
        metrics.page.add_route(app)
        http = await stack.enter_async_context(serving(app, control, agent.gateway, token))
        agents_http = await stack.enter_async_context(
            serving(create_wire(attempts), wire, agent.wire, None, error_body)
        )
        if settings.announce_dir is not None:
            write_announcement(settings.announce_dir, NAME, url)
        logger.info("gateway is up url=%s wire=%s run_id=%s", url, wire_url, run.id)
        await _work(worker, attempts, http, agents_http)


def _tool_client(settings: GatewaySettings, broker: Broker, server_id: str) -> ToolClient:
    """Return the client of the tools, and of the service that runs agents."""
    run, agent = settings.run, settings.agent
    named = {**settings.tools, AGENTS: agent.url}
    own = agent.token_file
    return ToolClient(
        {name: url for name, url in named.items() if url is not None},
        directory=ToolDirectory(server_id=server_id, follow_schemas=True),
        registry=ToolRegistry(broker, run.tool_pool or run.id),
        announced=[name for name, url in named.items() if url is None],
        timeout_s=settings.tool_timeout_s,
        retries=RETRIES,
        max_requests=agent.max_concurrent,
        token=find_token(run),
        own_tokens={} if own is None else {AGENTS: read_token(own, "agent.token_file")},
    )


async def _connect(settings: GatewaySettings) -> Broker:
    redis = settings.redis
    return await Broker.connect(
        redis.connection_url(),
        settings.run.id,
        lease_s=redis.lease_s,
        max_processing_failures=redis.max_processing_failures,
    )


async def _work(worker: SampleWorker, attempts: AgentAttempts, *others: asyncio.Task[None]) -> None:
    """Work until cancelled, or until one of the parts ends by itself, which is an error."""
    working = asyncio.create_task(worker.run())
    dropping = asyncio.create_task(_drop_earlier(worker))
    try:
        done, _ = await asyncio.wait(
            [working, dropping, *others], return_when=asyncio.FIRST_COMPLETED
        )
        for part in done:
            part.result()  # raises what ended it
        raise RuntimeError("a part of the gateway ended; the lines above say why")
    finally:
        dropping.cancel()
        attempts.is_stopping = True
        worker.stop()
        await asyncio.wait([working], timeout=WORKER_STOP_TIMEOUT_S)
        working.cancel()
        await asyncio.gather(working, dropping, return_exceptions=True)


DROP_EVERY_S = 5.0


async def _drop_earlier(worker: SampleWorker) -> None:
    """Drop attempts that an earlier start of the learner asked for, now and then."""
    while True:
        await asyncio.sleep(DROP_EVERY_S)
        await worker.drop_earlier_incarnations()
