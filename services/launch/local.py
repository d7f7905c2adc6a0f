"""`agent-r1 train` on one machine: every service as a process of its own, from start to summary.

cli/training/train.py --Config--> here --> run folder (`config.json`, `logs/`), local_services.py
(the processes), local_view.py and local_result.py (the terminal). local_client.py lends the same
services, without a learner, to `agent-r1 evaluate` and `agent-r1 chat`; local_table.py runs several
learners on them in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol

from agent_r1.config import checks as config_checks
from agent_r1.config.models import fetch_models, model_variables, with_models
from agent_r1.config.run import Config, ConfigError, write_config
from agent_r1.config.sources import quoted
from agent_r1.launch.local_result import (
    EXIT_OF_STATUS,
    note_failure,
    print_nothing_to_do,
    print_result,
    print_stopped,
    summary_of,
)
from agent_r1.launch.local_services import LocalServices
from agent_r1.launch.local_view import TrainingView, program
from agent_r1.launch.local_watch import Watch
from agent_r1.launch.supervisor import ServiceError
from agent_r1.learner.checkpoints.ownership import writer_of
from agent_r1.learner.checkpoints.standing import resume_notes, state_problem
from agent_r1.learner.heartbeat import refuse_a_second
from agent_r1.learner.outcome import finished_status, last_summary
from agent_r1.runtime.config import RunConfig
from agent_r1.runtime.exit_status import EXIT_FAILED, EXIT_INTERRUPTED
from agent_r1.runtime.files.conditions import Condition, append_condition, close_left_open
from agent_r1.runtime.files.dead_letters import load_letters, save_letters
from agent_r1.runtime.files.private import private_folder, write_private
from agent_r1.runtime.files.run_folder import (
    CONDITIONS_FILE,
    CONFIG_FILE,
    LAUNCHER_FILE,
    LIVE_DIR,
    LOGS_DIR,
    run_folder_problem,
    running_launcher,
)
from agent_r1.runtime.logs import make_formatter
from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from agent_r1_proto.weights import NewestVersion

logger = logging.getLogger(__name__)

LAUNCHER_LOG = "launcher.log"
CLAIM_POLL_S = 0.5
LEARNER_END_S = 3.0
CLAIM_MARGIN_S = 5.0
DEAD_LETTERS_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 5.0


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP: the first asks for a clean stop, the second kills."""

    def __init__(self, kill: Callable[[], None], report: Callable[[str], None]) -> None:
        self.asked = asyncio.Event()
        self._kill = kill
        self._report = report
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(sig, self._handle)

    def _handle(self) -> None:
        if self.asked.is_set():
            self._report("killing every service")
            self._kill()
            return
        self._report(
            "stopping; the learner writes a checkpoint (interrupt again to kill everything at once)"
        )
        self.asked.set()


def claim_run_folder(folder: Path, *, resume: bool) -> None:
    """Create the run folder, or make sure that it can be resumed.

    Raises:
        ConfigError: it is not empty, holds nothing to resume, or its run is still running.
    """
    problem = run_folder_problem(folder, resume=resume)
    if problem is not None:
        raise ConfigError(problem)
    if resume:
        _wait_for_learner(folder)
    try:
        private_folder(folder)
        (folder / LOGS_DIR).mkdir(exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"cannot create the run folder {folder}: {exc.strerror}; name another with --run-dir"
        ) from exc


def _wait_for_learner(folder: Path) -> None:
    """Wait a moment for the learner of a launcher that was killed, which ends with it.

    Raises:
        ConfigError: a learner that was started by hand trains there.
    """
    deadline = time.monotonic() + LEARNER_END_S
    while (writer := writer_of(folder)) is not None:
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"a learner trains in {folder} ({writer}); stop it first: the run then continues "
                "with --resume"
            )
        time.sleep(CLAIM_POLL_S)


@contextlib.contextmanager
def launcher_state(folder: Path) -> Iterator[Path]:
    """Make a private folder for this start in the run folder, and say there where it is."""
    state_dir = folder.absolute() / LIVE_DIR
    shutil.rmtree(state_dir, ignore_errors=True)  # of a launcher that was killed
    private_folder(state_dir)
    values = {
        "pid": os.getpid(),
        "command": Path("/proc/self/cmdline").read_bytes().decode(errors="replace"),
        "state_dir": str(state_dir),
        "started_at": time.time(),
    }
    write_private(folder / LAUNCHER_FILE, json.dumps(values, indent=2) + "\n")
    try:
        yield state_dir
    finally:
        (folder / LAUNCHER_FILE).unlink(missing_ok=True)
        shutil.rmtree(state_dir, ignore_errors=True)


async def _claim_run_id(broker: Broker, config: Config, report: Callable[[str], None]) -> None:
    """Take a run id on a Redis that others may use, and clear what an earlier start left there.

    A start needs nothing of an earlier one: the learner issues its outstanding groups again.

    Raises:
        ConfigError: servers or a learner of a run with this id are at work.
    """
    registry = Registry(broker)
    try:
        await refuse_a_second(registry, config.run.id, config.run.folder())
    except ValueError as exc:
        raise ConfigError(str(exc)) from exc
    deadline = time.monotonic() + config.rollout.announce_expiry_s + CLAIM_MARGIN_S
    waiting = False
    while servers := await registry.rollout_servers():
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"run.id ({config.run.id!r}) is in use on this Redis: rollout server "
                f"{servers[0].server_id} (process {servers[0].pid} on {servers[0].host}) serves "
                "it; stop that run or choose another run.id"
            )
        if not waiting:
            report(
                f"waiting until servers of an earlier start of run {config.run.id!r} have expired"
            )
        waiting = True
        await asyncio.sleep(CLAIM_POLL_S)
    keys = [key async for key in broker.redis.scan_iter(match=f"{broker.keys.prefix}*")]
    if keys:
        await broker.redis.delete(*keys)


async def prepare_redis(
    services: LocalServices, config: Config, report: Callable[[str], None], *, learner: bool
) -> None:
    """Start Redis and take the run id on it; without a learner, version 0 is the newest.

    Raises:
        ConfigError: the run id is in use.
        ServiceError: Redis did not come up.
    """
    url = await services.start_redis()
    async with await Broker.connect(url, config.run.id) as broker:
        await _claim_run_id(broker, config, report)
        services.holds_run_id = True
        if not learner:
            # No learner will say which weights are the newest: the configured model's are.
            await Registry(broker).set_newest_version(NewestVersion(policy_version=0))


async def first_of(*waiting: asyncio.Future[Any]) -> None:
    """Wait for the first to end, and raise what it raised."""
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for future in done:
        future.result()


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _save_dead_letters(
    url: str, config: Config, folder: Path, report: Callable[[str], None]
) -> None:
    """Keep what could not be processed, and say so; `url` is "" where Redis did not come up."""
    if not url:
        return
    try:
        async with asyncio.timeout(DEAD_LETTERS_TIMEOUT_S):
            async with await Broker.connect(url, config.run.id) as broker:
                letters = await broker.dead_letters()
    except (TimeoutError, OSError) as exc:
        logger.warning("dead letters not saved error=%r", exc)
        return
    save_letters(folder, letters)
    if count := len(load_letters(folder)):
        listing = f"{program('agent-r1')} status {quoted(folder)}"
        report(f"!! {count} dead letters: {listing}")


async def leave_shared_redis(config: Config) -> None:
    """Delete what a run whose services have stopped left in a Redis that it did not start."""
    if config.redis.url is None:
        return
    try:
        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            async with await Broker.connect(config.redis.connection_url(), config.run.id) as broker:
                await broker.forget_run()
    except (TimeoutError, OSError) as exc:
        logger.warning("keys of the run stay in redis run_id=%s error=%r", config.run.id, exc)


# --- Services and a view of them ---------------------------------------------------------------


class View(Protocol):
    """Shows the user what happens while the services run."""

    def event(self, line: str) -> None:
        """Print a line that stays."""
        ...

    async def follow(self, starting: Callable[[], list[str]]) -> None:
        """Show what happens until cancelled; `starting` names the services that are not up yet."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def log_to(file: Path, run: RunConfig) -> logging.Handler:
    """Send the launcher's own log to a file: the terminal belongs to the view."""
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(make_formatter(run.log_format, run_id=run.id, service="launcher"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(run.log_level)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    return handler


def open_folder(config: Config, folder: Path) -> dict[str, str]:
    """Write `config.json` and begin the launcher's log; return the secrets that the file lacks."""
    secrets = write_config(config, folder / CONFIG_FILE)
    log_to(folder / LOGS_DIR / LAUNCHER_LOG, config.run)
    return secrets


@contextlib.asynccontextmanager
async def watched(
    services: LocalServices, config: Config, note: Callable[[Condition], None]
) -> AsyncIterator[None]:
    """Watch services while the block lasts; then stop them, and leave a shared Redis as it was."""
    watching = asyncio.create_task(Watch(services, config.run.id, note).watch_forever())
    try:
        yield
    finally:
        await cancel_all(watching)
        await asyncio.shield(services.stop())
        if services.holds_run_id:
            await leave_shared_redis(config)


def run_services(
    config: Config,
    folder: Path,
    secrets: dict[str, str],
    work: Callable[[LocalServices], Coroutine[Any, Any, None]],
    view: View,
) -> bool:
    """Run services until the work is done, one of them ends the run, or the user stops it.

    Args:
        config: of the services.
        folder: has their configuration and gets their logs.
        secrets: environment variables with what its `config.json` leaves out.
        work: starts the services, and ends when they are needed no longer.
        view: shows what happens.

    Returns:
        True when the user stopped it.

    Raises:
        ServiceError: a service did not come up, or died too often; the text says which and why.
    """
    with launcher_state(folder):
        return asyncio.run(_run_services(config, folder, secrets, work, view))


async def _run_services(
    config: Config,
    folder: Path,
    secrets: dict[str, str],
    work: Callable[[LocalServices], Coroutine[Any, Any, None]],
    view: View,
) -> bool:
    # Not at the top: clients of the services need no web framework.
    from agent_r1.launch.local_metrics import launcher_server

    services = LocalServices(config, folder=folder, secrets=secrets, report=view.event)
    supervisor = services.supervisor
    interrupts = Interrupts(supervisor.kill, view.event)
    asked = asyncio.create_task(interrupts.asked.wait())
    over = asyncio.create_task(supervisor.wait())
    following = asyncio.create_task(view.follow(supervisor.starting))

    close_left_open(folder / CONDITIONS_FILE, "launcher")

    def note(condition: Condition) -> None:
        view.event(condition.text())
        with contextlib.suppress(OSError):  # a full disk is no reason to watch no longer
            append_condition(folder / CONDITIONS_FILE, condition)

    try:
        async with watched(services, config, note):
            working = asyncio.create_task(work(services))
            try:
                async with launcher_server(services.served(), supervisor):
                    await first_of(working, over, asked)
            finally:
                await cancel_all(working)
                await _save_dead_letters(services.redis_url, config, folder, view.event)
                if not asked.done():  # else the first interrupt has said it
                    view.event("stopping the services")
    finally:
        await cancel_all(following, over, asked)
        view.close()
    return interrupts.asked.is_set()


# --- Training ----------------------------------------------------------------------------------


def require_state(config: Config) -> None:
    """Refuse to continue a run whose folder does not say where it stands.

    Raises:
        ConfigError: its ledger is missing, torn or too old, or its newest checkpoint is damaged.
    """
    stored = config.learner.checkpoint_url is not None
    problem = state_problem(config.run.folder(), stored=stored)
    if problem is not None:
        raise ConfigError(problem)


def nothing_to_do(config: Config) -> str | None:
    """Return the status of a run that has finished, and say so; None where steps are left."""
    folder = config.run.folder()
    if not last_summary(folder):
        return None
    steps = config.learner.steps
    total = config.learner.num_steps(len(config.prompt_order())) if steps is None else steps
    status = finished_status(folder, total, config.evaluation.patience)
    if status is not None:
        print_nothing_to_do(folder, status)
    return status


def run_training(config: Config, *, resume: bool, temporary: bool = False) -> int:
    """Run or resume training with every service on this machine.

    Args:
        config: of the run.
        resume: continue the run in the run folder.
        temporary: the caller deletes the run folder, so the user is not sent there.

    Returns:
        Exit status (`agent_r1.runtime.exit_status`): 0 finished, 1 stopped for a reason that was
        printed, 3 finished with losses beyond what is allowed, 130 interrupted.

    Raises:
        ConfigError: nothing was started, for the reason given.
    """
    folder = config.run.folder()
    if resume and running_launcher(folder) is None:
        require_state(config)
        if status := nothing_to_do(config):
            return EXIT_OF_STATUS[status]
    config_checks.check(config, "train", resume=resume)
    models = fetch_models(config, print)
    if models:  # what is said of them could not be checked before
        config_checks.check(with_models(config, models), "train", resume=resume)
    claim_run_folder(folder, resume=resume)
    close_left_open(folder / CONDITIONS_FILE, "launcher", "learner")
    variables = {**open_folder(config, folder), **model_variables(models)}
    view = TrainingView(folder, config)
    if resume and config.learner.checkpoint_url is None:  # else the run store says where it stands
        for note in resume_notes(folder):
            view.event(note)

    async def train(services: LocalServices) -> None:
        await prepare_redis(services, config, view.event, learner=True)
        await services.start_all(learner=True, resume=resume)
        await services.supervisor.wait()

    try:
        interrupted = run_services(config, folder, variables, train, view)
    except ServiceError as exc:
        logger.error("run stopped reason=%s", exc)
        note_failure(folder, str(exc))
        print_stopped(folder, str(exc), temporary=temporary)
        return EXIT_FAILED
    except ConfigError:
        raise
    except Exception as exc:
        logger.exception("unexpected error in the launcher")
        where = folder / LOGS_DIR / LAUNCHER_LOG
        print_stopped(folder, f"{exc!r}; the traceback is in {where}", temporary=temporary)
        return EXIT_FAILED
    status = None if interrupted else summary_of(folder).get("status")
    if status not in EXIT_OF_STATUS:  # the learner also ends in order when it is stopped
        print_stopped(folder, None, temporary=temporary)
        return EXIT_INTERRUPTED
    if not temporary:
        print_result(folder, config.score_names())
    return EXIT_OF_STATUS[status]
