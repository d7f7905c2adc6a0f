"""Starts one rollout server: engine, chat format, tools, stream worker and HTTP routes.

`cli/services/serve.py` calls `serve` with the tables of one run. Samples come from the stream
`tasks`, weights from the learner's snapshots; trajectories go to the stream `trajectories`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agent_r1.attempts.tool_client import ToolClient
from agent_r1.attempts.tool_discovery import ToolDirectory
from agent_r1.attempts.worker import SampleWorker
from agent_r1.rollout.agent_loop import AgentLoop
from agent_r1.rollout.app import create_app
from agent_r1.rollout.config import EnvConfig, RolloutConfig
from agent_r1.rollout.decoding.scorer import BranchScorer, RewardService
from agent_r1.rollout.envs import load_env_class
from agent_r1.rollout.metrics import RolloutMetrics
from agent_r1.rollout.policy import Policy
from agent_r1.rollout.watchdog import watch
from agent_r1.rollout.weight_versions import WeightVersions
from agent_r1.runtime.announcements import (
    make_consumer_name,
    withdraw_announcement,
    write_announcement,
)
from agent_r1.runtime.config import ModelConfig, RedisConfig, RunConfig
from agent_r1.runtime.files.disk_space import require_shared_memory
from agent_r1.runtime.http.serving import advertised_url, bind, serving, stop_signals
from agent_r1.runtime.http.token import find_token
from agent_r1.runtime.imports import quick_imports
from agent_r1.runtime.metrics import MetricsPage
from agent_r1.runtime.together import run_together
from agent_r1.text.chat_format import ChatFormat, reply_roles
from agent_r1.text.chat_template import load_tokenizer
from agent_r1.text.template_checks import ANY_TOOL, check_call_format
from agent_r1.text.tokens import EngineDeadError, Sampler
from agent_r1.text.tool_formats import NO_CALLS, load_tool_format
from agent_r1.weights.collective import CollectiveFetcher
from agent_r1.weights.file import FileFetcher
from agent_r1.weights.http import HttpFetcher, require_room_for_versions
from agent_r1.weights.manifest import Fetcher
from agent_r1_proto.connection import ROLLOUT_GROUP, NotRedisError
from agent_r1_proto.failures import FailureBoard
from agent_r1_proto.registry import WITHDRAW_TIMEOUT_S, Registry, ToolRegistry
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.weights import TransportName

logger = logging.getLogger(__name__)

NAME = "rollout"
WORKER_STOP_TIMEOUT_S = 15.0
END_TIMEOUT_S = 60.0
"""Time the clean-up may take after the engine has died; then the process is ended."""
EXIT_ENGINE_DEAD = 70


@dataclass(frozen=True)
class RolloutSettings:
    """The tables one rollout server needs."""

    run: RunConfig
    model: ModelConfig
    redis: RedisConfig
    env: EnvConfig
    rollout: RolloutConfig
    tools: Mapping[str, str | None]
    """Base URL of every tool service, by name; None: it announces itself in the tool pool."""
    weights_dir: Path
    """Transport `file`: weights are loaded from files below this folder only."""
    takes_samples: bool = True
    """False: gateways take the samples, and ask this server for tokens."""
    transport: TransportName = "file"
    """Transport by which the learner publishes weights."""
    announce_dir: Path | None = None
    """Folder of the launcher's announcements; None writes none."""


def serve(settings: RolloutSettings) -> None:
    """Serve until SIGTERM or SIGINT; samples in flight are then given back.

    Raises:
        ValueError: a table, the chat template, a tool or the user's environment is wrong.
        PolicyError: the engine did not start, or died while serving.
    """
    asyncio.run(_serve_with_vllm(settings))


async def _serve_with_vllm(settings: RolloutSettings) -> None:
    # The engine's settings are environment variables that must be set before torch is imported.
    from agent_r1.rollout.vllm.settings import VllmSettings, prepare_environment, read_model

    model, rollout = settings.model, settings.rollout
    engine = VllmSettings(
        model, rollout, seed=settings.run.seed, deterministic=settings.run.deterministic
    )
    prepare_environment(engine)
    with quick_imports():
        facts = await asyncio.to_thread(read_model, engine)
        if settings.transport != "file":
            require_room_for_versions(rollout.weights_dir, facts.versions.num_values, model.dtype)
        if rollout.tensor_parallel_size > 1:
            require_shared_memory(f"{rollout.tensor_parallel_size} tensor-parallel processes")
        chat = await asyncio.to_thread(
            build_chat_format,
            settings.env,
            str(facts.directory),
            facts.eos_token_ids,
            has_tools=bool(settings.tools),
        )
        from agent_r1.rollout.vllm.policy import VllmPolicy

    await serve_policy(VllmPolicy(engine), chat, settings, on_death=_end_process_later)


def _end_process_later() -> None:
    """End this process even where its clean-up hangs: in a thread that reads a dead disk, say."""
    timer = threading.Timer(END_TIMEOUT_S, os._exit, [EXIT_ENGINE_DEAD])
    timer.daemon = True
    timer.start()


def build_chat_format(
    env: EnvConfig, model_path: str, end_of_turn_ids: tuple[int, ...], *, has_tools: bool
) -> ChatFormat:
    """Load the tokenizer and check its chat template against the environment's needs.

    Args:
        env: the environment's table.
        model_path: folder with the tokenizer.
        end_of_turn_ids: tokens at which the policy ends a turn.
        has_tools: tools are configured, so that calls must be written as they are read.

    Raises:
        ValueError: the template or the environment cannot be used; the text says what to do.
    """
    env_class = load_env_class(env.type, set(env.options))
    tokenizer = load_tokenizer(model_path)
    offers_tools = has_tools and env.enable_tools != []
    tool_format = load_tool_format(env.tool_format) if offers_tools else NO_CALLS
    # Their schemas are known only later, and matter to no template seen so far.
    remark = check_call_format(
        tokenizer, tool_format, [ANY_TOOL] if offers_tools else [], env.chat_template_kwargs
    )
    if remark is not None:
        logger.warning("call format unknown remark=%s", remark)
    chat = ChatFormat(
        tokenizer,
        end_of_turn_ids=end_of_turn_ids,
        template_kwargs=env.chat_template_kwargs,
        reply_roles=reply_roles(
            tools=offers_tools and tool_format.in_template, messages=env_class.sends_messages
        ),
        tool_format=tool_format,
        segments=env.rewritten_history == "segments",
    )
    chat.check_system_prompt(env.system_prompt)
    return chat


async def serve_policy(
    policy: Policy,
    chat: ChatFormat,
    settings: RolloutSettings,
    *,
    on_death: Callable[[], None] | None = None,
) -> None:
    """Start a policy and serve samples with it until SIGTERM or SIGINT.

    Args:
        policy: is started and stopped here.
        chat: of its model.
        settings: of the server.
        on_death: called once when the policy has died, before the clean-up.

    Raises:
        ValueError: an address cannot be bound, or a tool is not there or wrong.
        PolicyError: the policy did not start, or died while serving.
    """
    with stop_signals() as (stop, _):
        stopped = asyncio.create_task(stop.wait())
        serving_samples = asyncio.create_task(_serve_samples(policy, chat, settings, on_death))
        try:
            await asyncio.wait([serving_samples, stopped], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            serving_samples.cancel()
            await asyncio.wait([serving_samples])
    if not serving_samples.cancelled():
        serving_samples.result()  # raises what ended it
    logger.info("rollout server has stopped run_id=%s", settings.run.id)


async def _serve_samples(
    policy: Policy,
    chat: ChatFormat,
    settings: RolloutSettings,
    on_death: Callable[[], None] | None,
) -> None:
    """Start the parts, work until cancelled or drained, then stop them in reverse order."""
    run, rollout = settings.run, settings.rollout
    token = find_token(run)
    async with AsyncExitStack() as stack:
        listener = bind(NAME, rollout, token)
        stack.callback(listener.close)
        port = listener.getsockname()[1]
        url = advertised_url(NAME, rollout, port)
        server_id = rollout.server_id or f"{socket.gethostname()}-{port}-{os.getpid()}"
        broker = await stack.enter_async_context(await connect(settings))
        tools = make_tool_client(settings, broker, server_id)
        stack.push_async_callback(tools.stop)
        scorer: RewardService | None = None
        if rollout.scorer_url is not None:
            scorer = RewardService(rollout.scorer_url, token)
            stack.push_async_callback(scorer.close)
        stack.push_async_callback(policy.stop)
        await run_together([tools.start(rollout.tool_start_timeout_s), policy.start()])
        registry = Registry(broker)
        fetcher = await stack.enter_async_context(_fetcher(settings, registry, server_id))
        versions = WeightVersions(policy, registry, fetcher)
        loop = make_agent_loop(policy, chat, tools, settings, server_id, scorer)
        worker = await stack.enter_async_context(_sample_worker(settings, broker, versions, loop))
        app = create_app(
            server_id=server_id,
            policy=policy,
            versions=versions,
            in_flight=lambda: worker.in_flight,
        )
        fetcher.add_routes(app)
        _metrics(settings, policy, chat, tools, versions, worker).add_route(app)
        http = await stack.enter_async_context(serving(app, listener, rollout, token))
        if settings.announce_dir is not None:
            write_announcement(settings.announce_dir, NAME, url)
        logger.info("rollout server is up server_id=%s url=%s run_id=%s", server_id, url, run.id)
        announcing = versions.announce_until_drained(
            server_id=server_id,
            url=url,
            expiry_s=rollout.announce_expiry_s,
            on_beat=worker.drop_earlier_incarnations,
        )
        watching = watch(policy, rollout.engine_stall_timeout_s)
        withdraw = partial(_withdraw, registry, server_id)
        await _work(worker, http, announcing, watching, withdraw=withdraw, on_death=on_death)
        if settings.announce_dir is not None:
            withdraw_announcement(settings.announce_dir, NAME)


@asynccontextmanager
async def _sample_worker(
    settings: RolloutSettings, broker: Broker, versions: WeightVersions, loop: AgentLoop
) -> AsyncGenerator[SampleWorker]:
    """Give what takes samples from the stream `tasks`; it is yet to be run."""
    rollout = settings.rollout
    reader = rollout.server_id or make_consumer_name(NAME, settings.announce_dir)
    tasks = broker.keys.tasks
    async with broker.consumer(
        tasks, RolloutTask, group=ROLLOUT_GROUP, consumer=reader
    ) as consumer:
        yield SampleWorker(
            consumer=consumer,
            registry=Registry(broker),
            run_attempt=loop.run,
            versions=versions,
            trajectories=broker.keys.trajectories,
            max_concurrent=rollout.max_concurrent if settings.takes_samples else 0,
            board=FailureBoard(broker),
        )


def _metrics(
    settings: RolloutSettings,
    policy: Policy,
    chat: ChatFormat,
    tools: ToolClient,
    versions: WeightVersions,
    worker: SampleWorker,
) -> MetricsPage:
    folder = settings.rollout.weights_dir
    metrics = RolloutMetrics({} if folder is None else {"rollout.weights_dir": folder})
    metrics.watch(
        policy,
        tools.directory,
        chat.spelled_out,
        in_flight=lambda: worker.in_flight,
        max_concurrent=settings.rollout.max_concurrent,
    )
    worker.on_attempt = metrics.note_attempt
    versions.on_load = metrics.note_load
    return metrics.page


def _fetcher(settings: RolloutSettings, registry: Registry, server_id: str) -> Fetcher:
    if settings.transport == "file":
        return FileFetcher(settings.weights_dir, settings.run.id)
    parent, timeout_s = settings.rollout.weights_dir, settings.rollout.weight_load_timeout_s
    if settings.transport == "collective":
        return CollectiveFetcher(settings.run.id, server_id, parent, timeout_s)
    return HttpFetcher(
        registry,
        run_id=settings.run.id,
        server_id=server_id,
        parent=parent,
        timeout_s=timeout_s,
        token=find_token(settings.run),
    )


def make_tool_client(settings: RolloutSettings, broker: Broker, server_id: str) -> ToolClient:
    """Return the client of the configured tools, which is yet to be started."""
    run, env = settings.run, settings.env
    return ToolClient(
        {name: url for name, url in settings.tools.items() if url is not None},
        directory=ToolDirectory(server_id=server_id, follow_schemas=env.follow_tool_schemas),
        registry=ToolRegistry(broker, run.tool_pool or run.id),
        announced=[name for name, url in settings.tools.items() if url is None],
        timeout_s=env.tool_timeout_s,
        retries=env.tool_retries,
        max_requests=settings.rollout.max_tool_requests,
        token=find_token(run),
    )


def make_agent_loop(
    policy: Sampler,
    chat: ChatFormat,
    tools: ToolClient,
    settings: RolloutSettings,
    server_id: str,
    scorer: BranchScorer | None = None,
) -> AgentLoop:
    """Return what runs trajectories with the configured environment."""
    env = settings.env
    return AgentLoop(
        policy=policy,
        chat=chat,
        tools=tools,
        env=env,
        make_env=partial(load_env_class(env.type, set(env.options)), **env.options),
        max_context=settings.model.max_context,
        run_seed=settings.run.seed,
        server_id=server_id,
        scorer=scorer,
    )


async def connect(settings: RolloutSettings) -> Broker:
    """Connect to the Redis of the run.

    Raises:
        ValueError: redis.url is not set.
    """
    redis = settings.redis
    return await Broker.connect(
        redis.connection_url(),
        settings.run.id,
        lease_s=redis.lease_s,
        max_processing_failures=redis.max_processing_failures,
    )


async def _withdraw(registry: Registry, server_id: str) -> None:
    with suppress(TimeoutError, NotRedisError):
        async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
            await registry.withdraw_rollout_server(server_id)


async def _work(
    worker: SampleWorker,
    http: asyncio.Task[None],
    announcing: Coroutine[None, None, float],
    watching: Coroutine[None, None, None],
    *,
    withdraw: Callable[[], Coroutine[None, None, None]],
    on_death: Callable[[], None] | None,
) -> None:
    """Work until cancelled or drained, or until one of the parts ends by itself, an error.

    In the end nobody may count on this server any more before it gives its samples back.
    """
    working = asyncio.create_task(worker.run())
    told_to_drain = asyncio.create_task(announcing)
    others = [told_to_drain, asyncio.create_task(watching)]
    try:
        done, _ = await asyncio.wait([working, http, *others], return_when=asyncio.FIRST_COMPLETED)
        if done == {told_to_drain}:
            drain_s = told_to_drain.result()
            logger.info("draining num_samples=%d timeout_s=%g", worker.in_flight, drain_s)
            await withdraw()
            worker.drain()
            done, _ = await asyncio.wait(
                [working, http, *others[1:]],
                timeout=drain_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        for part in done:
            part.result()  # raises what ended it
        if not told_to_drain.done() or done - {working}:
            raise RuntimeError("a part of the rollout server ended; the lines above say why")
    except EngineDeadError:
        if on_death is not None:
            on_death()
        raise
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        worker.stop()
        await withdraw()
        await asyncio.wait([working], timeout=WORKER_STOP_TIMEOUT_S)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
