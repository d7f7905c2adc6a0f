"""Starts one rollout server: engine, chat format, tools, stream worker and HTTP routes.

`agent_r1.cli` calls `serve` with the tables of one run. Samples come from the stream `tasks`,
weights from the learner's snapshots; trajectories go to the stream `trajectories`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agent_r1.rollout.agent_loop import AgentLoop
from agent_r1.rollout.app import create_app
from agent_r1.rollout.chat_format import ChatFormat, load_tokenizer
from agent_r1.rollout.config import EnvTable, RolloutTable
from agent_r1.rollout.envs import load_env_class
from agent_r1.rollout.policy import Policy
from agent_r1.rollout.server import (
    advertised_url,
    announce_forever,
    bind,
    serving,
    write_announcement,
)
from agent_r1.rollout.tool_client import ToolClient
from agent_r1.rollout.versions import WeightVersions
from agent_r1.rollout.worker import RolloutWorker
from agent_r1_proto.config import ModelTable, RedisTable, RunTable
from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask

logger = logging.getLogger(__name__)

GROUP = "rollout"
WITHDRAW_TIMEOUT_S = 2.0
WORKER_STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class RolloutSettings:
    """The tables one rollout server needs."""

    run: RunTable
    model: ModelTable
    redis: RedisTable
    env: EnvTable
    rollout: RolloutTable
    tools: Mapping[str, str]
    """Base URL of every tool service, by name."""
    announce_dir: Path | None = None
    """Folder of the launcher's announcements; None writes none."""


def serve(
    *,
    run: RunTable,
    model: ModelTable,
    redis: RedisTable,
    env: EnvTable,
    rollout: RolloutTable,
    tools: Mapping[str, str],
    announce_dir: Path | None,
) -> None:
    """Serve until SIGTERM or SIGINT; samples in flight are then given back.

    Raises:
        ValueError: a table, the chat template, a tool or the user's environment is wrong.
        PolicyError: the engine did not start, or died while serving.
    """
    settings = RolloutSettings(run, model, redis, env, rollout, tools, announce_dir)
    asyncio.run(_serve_with_vllm(settings))


async def _serve_with_vllm(settings: RolloutSettings) -> None:
    # The engine's settings are environment variables that must be set before torch is imported.
    from agent_r1.rollout.vllm_settings import VllmSettings, prepare_environment, read_model

    model, rollout = settings.model, settings.rollout
    engine = VllmSettings(
        model_path=model.path,
        dtype=model.dtype,
        max_context=model.max_context,
        max_concurrent=rollout.max_concurrent,
        kv_cache_gib=rollout.kv_cache_gib,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        tensor_parallel_size=rollout.tensor_parallel_size,
        max_batched_tokens=rollout.max_batched_tokens,
        threads=rollout.threads,
        enforce_eager=rollout.enforce_eager,
        seed=settings.run.seed,
        start_timeout_s=rollout.engine_start_timeout_s,
        load_timeout_s=rollout.weight_load_timeout_s,
    )
    prepare_environment(engine)
    facts = await asyncio.to_thread(read_model, engine)
    chat = await asyncio.to_thread(
        build_chat_format, settings.env, str(facts.directory), facts.eos_token_ids
    )
    from agent_r1.rollout.vllm_policy import VllmPolicy

    await serve_policy(VllmPolicy(engine), chat, settings)


def build_chat_format(
    env: EnvTable, model_path: str, end_of_turn_ids: tuple[int, ...]
) -> ChatFormat:
    """Load the tokenizer and check its chat template against the environment's needs.

    Raises:
        ValueError: the template or the environment cannot be used; the text says what to do.
    """
    env_class = load_env_class(env.type, set(env.options))
    return ChatFormat(
        load_tokenizer(model_path),
        end_of_turn_ids=end_of_turn_ids,
        template_kwargs=env.chat_template_kwargs,
        reply_roles=("tool", "user") if env_class.sends_messages else ("tool",),
    )


async def serve_policy(policy: Policy, chat: ChatFormat, settings: RolloutSettings) -> None:
    """Start a policy and serve samples with it until SIGTERM or SIGINT.

    Raises:
        ValueError: an address cannot be bound, or a tool is not there or wrong.
        PolicyError: the policy did not start, or died while serving.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving_task = asyncio.create_task(_serve_until(stop, policy, chat, settings))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([serving_task, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not serving_task.done():
            # `_serve_until` sees the event by itself; only a start that takes long is cut short.
            await asyncio.wait([serving_task], timeout=WORKER_STOP_TIMEOUT_S)
            serving_task.cancel()
        with suppress(asyncio.CancelledError):
            await serving_task
    finally:
        stopped.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _serve_until(
    stop: asyncio.Event, policy: Policy, chat: ChatFormat, settings: RolloutSettings
) -> None:
    run, env, rollout = settings.run, settings.env, settings.rollout
    async with AsyncExitStack() as stack:
        listener = bind(rollout)
        stack.callback(listener.close)
        url = advertised_url(rollout, listener.getsockname()[1])
        port = listener.getsockname()[1]
        server_id = rollout.server_id or f"{socket.gethostname()}-{port}-{os.getpid()}"
        tools = ToolClient(
            settings.tools,
            timeout_s=env.tool_timeout_s,
            retries=env.tool_retries,
            max_requests=rollout.max_tool_requests,
        )
        stack.push_async_callback(tools.stop)
        stack.push_async_callback(policy.stop)
        async with asyncio.TaskGroup() as starting:
            starting.create_task(tools.start(rollout.tool_start_timeout_s))
            starting.create_task(policy.start())
        redis = settings.redis
        assert redis.url is not None, "the launcher sets redis.url"
        broker = await Broker.connect(
            redis.url,
            run.id,
            lease_s=redis.lease_s,
            max_processing_failures=redis.max_processing_failures,
        )
        stack.push_async_callback(broker.close)
        consumer = await stack.enter_async_context(
            broker.consumer(broker.keys.tasks, RolloutTask, group=GROUP, consumer=server_id)
        )
        registry = Registry(broker)
        versions = WeightVersions(policy, run.id)
        env_class = load_env_class(env.type, set(env.options))
        worker = RolloutWorker(
            consumer=consumer,
            registry=registry,
            attempts=AgentLoop(
                policy=policy,
                chat=chat,
                tools=tools,
                env=env,
                make_env=partial(env_class, **env.options),
                max_context=settings.model.max_context,
                run_seed=run.seed,
                server_id=server_id,
            ),
            versions=versions,
            trajectories=broker.keys.trajectories,
            max_concurrent=rollout.max_concurrent,
        )
        app = create_app(
            server_id=server_id,
            policy=policy,
            versions=versions,
            in_flight=lambda: worker.in_flight,
        )
        http = await stack.enter_async_context(serving(app, listener))
        announcing = announce_forever(
            registry,
            versions,
            server_id=server_id,
            url=url,
            expiry_s=rollout.announce_expiry_s,
            on_beat=worker.drop_earlier_incarnations,
        )
        if settings.announce_dir is not None:
            write_announcement(settings.announce_dir, url)
        logger.info("rollout server is up server_id=%s url=%s run_id=%s", server_id, url, run.id)
        try:
            await _work_until(stop, worker, http, asyncio.create_task(announcing))
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                    await registry.withdraw_rollout_server(server_id)
    logger.info("rollout server has stopped server_id=%s", server_id)


async def _work_until(
    stop: asyncio.Event,
    worker: RolloutWorker,
    http: asyncio.Task[None],
    announcing: asyncio.Task[None],
) -> None:
    """Work until told to stop or one of the parts ends by itself, which is an error."""
    working = asyncio.create_task(worker.run())
    stopped = asyncio.create_task(stop.wait())
    parts = {working, http, announcing}
    try:
        await asyncio.wait({*parts, stopped}, return_when=asyncio.FIRST_COMPLETED)
        worker.stop()
        done, _ = await asyncio.wait([working], timeout=WORKER_STOP_TIMEOUT_S)
        for part in parts:
            if part.done():
                part.result()  # raises what ended it
        if not done:
            logger.warning("worker did not stop in time; its samples go on after their lease")
    finally:
        for part in (working, announcing, stopped):
            part.cancel()
        await asyncio.gather(working, announcing, stopped, return_exceptions=True)
