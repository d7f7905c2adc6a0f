"""The services of a run lent to a client on this machine: `evaluate`, `chat`, `try`.

cli/evaluation, cli/task --configuration, client--> here --> tools, reward and rollout
(local_services.py), without a learner, for as long as the client runs. What fails meanwhile is
shown at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from agent_r1.config.models import fetch_models, model_variables
from agent_r1.config.placement import PlacementConfig
from agent_r1.config.run import Config, write_config
from agent_r1.config.sources import Key
from agent_r1.launch.local import (
    LAUNCHER_LOG,
    cancel_all,
    first_of,
    log_to,
    prepare_redis,
    watched,
)
from agent_r1.launch.local_services import LocalServices, cache_folder
from agent_r1.launch.local_view import failure_text, log_of
from agent_r1.launch.supervisor import ServiceError, Supervisor
from agent_r1.runtime.config import RunConfig
from agent_r1.runtime.files.own_folder import OwnFolder
from agent_r1.runtime.files.private import private_folder
from agent_r1.runtime.files.run_folder import CLIENTS_DIR, CONFIG_FILE, LIVE_DIR, LOGS_DIR
from agent_r1_proto.failures import FailureBoard
from agent_r1_proto.streams import Broker

logger = logging.getLogger(__name__)

FAILURES_POLL_S = 0.5
LAST_LOOK_TIMEOUT_S = 5.0
RUN_ID_LENGTH = 64
FOLDER_PREFIX = "client-"
NEXT_STEP = "read the log, and correct the tool, the reward or the configuration"

T = TypeVar("T")


@contextlib.asynccontextmanager
async def serving(
    config: Config, report: Callable[[str], None], *, only_tools: bool = False
) -> AsyncIterator[tuple[Config, Supervisor]]:
    """Run tools, reward and rollout (no learner) while the block lasts; `model.path` is the policy.

    Args:
        config: of the services.
        report: called with each line the user must see.
        only_tools: start neither reward nor rollout; no model is fetched.

    Yields:
        The configuration to use (`redis.url` set, `run.id` one of its own), and the supervisor.

    Raises:
        ServiceError: a service did not come up, or died too often.
    """
    models: dict[Key, Path] = {}
    if only_tools:
        config = _without_models(config)
    else:
        models = await asyncio.to_thread(fetch_models, config, report)
    with work_folder(config) as (work_dir, shown):
        own = _own_config(config, work_dir)
        (work_dir / LIVE_DIR).mkdir(mode=0o700)
        log_dir = work_dir / LOGS_DIR
        log_dir.mkdir()
        secrets = {**write_config(own, work_dir / CONFIG_FILE), **model_variables(models)}
        with _logging_to(log_dir / LAUNCHER_LOG, own.run):
            services = LocalServices(
                own, folder=work_dir, secrets=secrets, report=report, trains=False
            )
            async with watched(services, own, lambda condition: report(condition.text())):
                await prepare_redis(services, own, report, learner=False)
                if only_tools:
                    await services.start_tools()
                else:
                    report("starting tools, reward and rollout")
                    await services.start_all(learner=False, resume=False)
                served = services.served()
                async with failures_shown(served, log_dir, report, shown):
                    yield served, services.supervisor


@contextlib.contextmanager
def _logging_to(file: Path, run: RunConfig) -> Iterator[None]:
    handler = log_to(file, run)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _own_config(config: Config, work_dir: Path) -> Config:
    """Return the configuration of a client's services: another run, in a folder of its own."""
    suffix = f"-client-{os.getpid()}"
    run_id = config.run.id[: RUN_ID_LENGTH - len(suffix)] + suffix
    run = config.run.model_copy(update={"id": run_id, "dir": work_dir})
    return config.model_copy(update={"run": run})


@contextlib.contextmanager
def work_folder(config: Config) -> Iterator[tuple[Path, set[str]]]:
    """Make the folder of one client: in the run folder, or in the cache where there is none.

    The next client removes what a killed one has left. Logs stay where something went wrong: a
    message names one.

    Yields:
        The folder, and an empty set, for the kinds of failures that are shown.
    """
    run = config.run.folder().absolute()
    parent = (run if os.access(run, os.W_OK) else cache_folder()) / CLIENTS_DIR
    private_folder(parent)
    folder, shown, kept = OwnFolder(parent, FOLDER_PREFIX), set[str](), False
    try:
        yield folder.path, shown
        kept = bool(shown)
    except Exception:
        kept = True
        raise
    finally:
        shutil.rmtree(folder.path / LIVE_DIR, ignore_errors=True)
        if kept:
            folder.keep()
        else:
            folder.remove()
        with contextlib.suppress(OSError):
            parent.rmdir()  # unless others are there


def _without_models(config: Config) -> Config:
    """Return a configuration that asks for no GPU: those are for model and learner."""
    changes = {
        "placement": PlacementConfig(),
        "engine": config.engine.model_copy(update={"ranks": 1, "device": "cpu"}),
        "rollout": config.rollout.model_copy(update={"tensor_parallel_size": 1}),
    }
    return config.model_copy(update=changes)


def run_client(
    config: Config,
    client: Callable[[Config], Coroutine[Any, Any, T]],
    report: Callable[[str], None],
    *,
    only_tools: bool = False,
) -> T:
    """Start the services, or the tools alone, run a client against them, and stop them.

    Raises:
        ValueError: a service did not come up; the text says which and why.
        KeyboardInterrupt: the user stopped it; everything is stopped.
    """

    async def run() -> T:
        async with serving(config, report, only_tools=only_tools) as (served, supervisor):
            over = asyncio.create_task(supervisor.wait())
            working = asyncio.ensure_future(client(served))
            try:
                await first_of(over, working)
                return working.result()
            finally:
                await cancel_all(over, working)

    try:
        return asyncio.run(run())
    except ServiceError as exc:
        raise ValueError(str(exc)) from exc


# --- What fails meanwhile ------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def failures_shown(
    config: Config, log_dir: Path, report: Callable[[str], None], shown: set[str] | None = None
) -> AsyncIterator[None]:
    """Show the first failure of each kind at once, as the failure board tells of it.

    Args:
        config: of the services.
        log_dir: folder of their logs.
        report: called with what is to be shown.
        shown: gets the kinds of failures that were.
    """
    shown = set() if shown is None else shown
    async with await Broker.connect(config.redis.connection_url(), config.run.id) as broker:
        board = FailureBoard(broker)

        async def look() -> None:
            for one, _ in await board.read():
                if one.kind not in shown:
                    shown.add(one.kind)
                    log = str(log_of(log_dir, one))
                    report(failure_text(one, log=log, next_step=NEXT_STEP))

        async def watch() -> None:
            while True:
                await look()
                await asyncio.sleep(FAILURES_POLL_S)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            await cancel_all(watching)
            try:
                await asyncio.wait_for(look(), LAST_LOOK_TIMEOUT_S)
            except (TimeoutError, OSError) as exc:
                logger.warning("last failures not read error=%r", exc)
