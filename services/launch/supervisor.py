"""Keeps the services of one run alive: start, wait until healthy, restart, stop in order.

local.py --ServiceSpec--> Supervisor --subreaper.py--> service. Every service runs below a
subreaper, in a session of its own, so that Ctrl-C in the terminal reaches the launcher alone, and
nothing stays when the launcher dies. Output goes to one log file a service. service.py knows what
one service is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from agent_r1.launch import subreaper
from agent_r1.launch.service import ServiceProcess, ServiceSpec, is_silent
from agent_r1.runtime.exit_status import EXIT_REASON
from agent_r1.runtime.files.disk_space import free_bytes, free_text, out_of_inodes
from agent_r1.runtime.memory import MIB, oom_kills

logger = logging.getLogger(__name__)

POLL_S = 0.05
NOTICE_POLL_S = 1.0
KILL_TIMEOUT_S = 10.0
"""Time the kernel gets to end a killed service."""
RESTART_DELAY_S = 1.0
ORPHAN_GRACE_S = 10.0
"""Time services get to stop by themselves when the launcher was killed."""
LEAST_FREE_BYTES = MIB
"""A disk with less room is full: a service that dies on it can write nothing, not even why."""
EXIT_CANNOT_START = 127


class ServiceError(RuntimeError):
    """A service could not be started, or died too often; says which, why and where its log is."""


def _full_disk(folder: Path) -> str | None:
    """Say that the disk of a folder is full, so that not even a log can be written; None else."""
    if free_bytes(folder) >= LEAST_FREE_BYTES and not out_of_inodes(folder):
        return None
    return (
        f"the disk is full: in {folder}, {free_text(folder)}; its log may lack "
        "the last lines. The last checkpoint is kept: free space there, or move the run folder to "
        "a larger disk, and continue"
    )


@dataclass(frozen=True)
class ServiceState:
    """State of one service."""

    name: str
    up: bool
    starts: int
    """Number of its starts."""
    url: str
    """URL at which it answers; "" where it has no routes, or is not up yet."""


class Supervisor:
    """Runs services until one of them ends the run, one dies too often, or `stop` is called."""

    def __init__(
        self,
        log_dir: Path,
        *,
        max_restarts: int = 6,
        restart_window_s: float = 1800.0,
        report: Callable[[str], None] | None = None,
        environment: Mapping[str, str] | None = None,
        explained: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """Prepare; starts nothing.

        Args:
            log_dir: gets the services' logs.
            max_restarts: deaths of a service within the window, after which the run is given up.
            restart_window_s: length of the window, in seconds.
            report: called with each line the user must see.
            environment: of the services; None: that of this process.
            explained: returns how many entries have been found out to end processes; with one more,
                earlier deaths of a service no longer count.
        """
        self._explained = explained
        self._environment = dict(os.environ if environment is None else environment)
        self._log_dir = log_dir
        self._max_restarts = max_restarts
        self._restart_window_s = restart_window_s
        self._report = report or (lambda line: None)
        self._services: dict[str, ServiceProcess] = {}
        self._expected: list[str] = []
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Lock of each GPU, held by the service that is starting on it."""
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def expect(self, *names: str) -> None:
        """Count services as starting that `start` will be called for."""
        self._expected += names

    async def start(self, spec: ServiceSpec) -> str:
        """Start a service, wait until it is up, and watch it from then on.

        Returns:
            The URL it announced; "" when it announces none.

        Raises:
            ServiceError: it died or was not up in time.
        """
        if sys.platform != "linux":
            raise ServiceError(
                f"the local launcher needs Linux, and this is {sys.platform}; use "
                "`docker compose -f docker-compose.yml -f deploy/compose.cpu.yml up`"
            )
        log_dir = spec.log_dir or self._log_dir
        log_dir.mkdir(parents=True, exist_ok=True)
        service = ServiceProcess(spec, log_dir / f"{spec.name}.log")
        self._services[spec.name] = service
        async with self._turn(spec):
            await self._spawn(service)
            service.noticed = service.log_offset
            self._watchers.append(asyncio.create_task(self._tell(service)))
            try:
                await self._wait_until_up(service)
            except ServiceError:
                await self._end(service)
                raise
        self._watchers.append(asyncio.create_task(self._watch(service)))
        return service.url

    async def wait(self) -> None:
        """Wait until the run is over.

        Raises:
            ServiceError: a service died and was not restarted.
        """
        await asyncio.shield(self._outcome)

    async def finished(self, name: str) -> None:
        """Wait until a service that is a job is done; `wait` says when it cannot be."""
        await self._services[name].finished.wait()

    async def stop(self) -> None:
        """Stop every service in order of rank, those of one rank together."""
        self._stopping = True
        ranks = sorted({service.spec.stop_rank for service in self._services.values()})
        for rank in ranks:
            await asyncio.gather(
                *(
                    self._end(service)
                    for service in self._services.values()
                    if service.spec.stop_rank == rank
                )
            )
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        if self._outcome.done() and not self._outcome.cancelled():
            self._outcome.exception()  # retrieved, or asyncio would complain

    def kill(self) -> None:
        """Kill every service at once; a `stop` in progress then ends quickly."""
        self._stopping = True
        for service in self._services.values():
            service.send(signal.SIGQUIT)

    def starting(self) -> list[str]:
        """Return the services that are not up yet."""
        names = dict.fromkeys([*self._services, *self._expected])
        return [n for n in names if n not in self._services or not self._services[n].up]

    def states(self) -> list[ServiceState]:
        """Return how every service is that was started."""
        return [
            ServiceState(name, one.up and one.running, one.num_starts, one.url)
            for name, one in self._services.items()
        ]

    async def silent(self, client: httpx.AsyncClient) -> dict[str, int]:
        """Return the process of every service that is up and does not answer, by name."""
        asked = {
            name: service
            for name, service in self._services.items()
            if service.up and service.running and service.url
        }
        silent = await asyncio.gather(*(is_silent(one.url, client) for one in asked.values()))
        pids = self.pids()
        return {
            name: next(iter(subreaper.descendants(pids[name])), pids[name])
            for name, found in zip(asked, silent, strict=True)
            if found and name in pids
        }

    def pids(self) -> dict[str, int]:
        """Return the process id of every running service's subreaper, by name."""
        return {
            name: service.process.pid
            for name, service in self._services.items()
            if service.process is not None and service.running
        }

    async def _spawn(self, service: ServiceProcess) -> None:
        spec = service.spec
        command = spec.command
        if service.num_starts and spec.restart_command is not None:
            command = spec.restart_command
        environment = {**self._environment, **spec.environment}
        if spec.port_variable is not None and service.port is not None:
            environment[spec.port_variable] = str(service.port)
        if spec.announce_dir is not None:
            spec.announce_dir.mkdir(parents=True, exist_ok=True)
            for stale in spec.announce_dir.glob("*.json"):
                stale.unlink()
        with service.log_file.open("ab") as log:
            service.log_offset = log.tell()
            service.oom_kills = oom_kills()
            service.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", subreaper.__file__),
                *("--parent", str(os.getpid()), "--grace-s", str(ORPHAN_GRACE_S)),
                *("--cores", ",".join(map(str, spec.cores)), "--"),
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        service.num_starts += 1
        service.up = False
        logger.info("service started name=%s subreaper_pid=%d", spec.name, service.process.pid)

    async def _wait_until_up(self, service: ServiceProcess) -> None:
        spec = service.spec
        deadline = time.monotonic() + spec.start_timeout_s
        while True:
            if not service.running:
                assert service.process is not None
                code = service.process.returncode or 0
                if code in spec.done_codes and (spec.ends_run or spec.is_job):
                    service.up = True  # there was nothing left to do
                    return
                raise self._error(service, f"did not start: {service.describe_exit(code)}")
            if await self._is_up(service):
                service.up = True
                logger.info("service up name=%s url=%s", spec.name, service.url)
                return
            if time.monotonic() >= deadline:
                raise self._error(service, f"was not up after {spec.start_timeout_s:g} s")
            await asyncio.sleep(POLL_S)

    async def _is_up(self, service: ServiceProcess) -> bool:
        spec = service.spec
        if spec.announce_dir is not None:
            announced = next(iter(sorted(spec.announce_dir.glob("*.json"))), None)
            if announced is None:
                return False
            service.url = str(json.loads(announced.read_text())["url"])
            if service.url:
                service.port = httpx.URL(service.url).port
        return spec.probe is None or await spec.probe(service.url)

    def _error(self, service: ServiceProcess, what: str) -> ServiceError:
        text = f"{service.spec.name} {what}\n{service.log_tail()}\n(log: {service.log_file})"
        return ServiceError(text)

    async def _tell(self, service: ServiceProcess) -> None:
        """Report what the service says to the terminal, until the run is over."""
        while True:
            for notice in service.notices():
                self._report(f"!! {notice}")
            # What a process prints has no event to wait for.
            await asyncio.sleep(NOTICE_POLL_S)

    async def _watch(self, service: ServiceProcess) -> None:
        """Restart the service whenever it dies, until the run is over."""
        while True:
            assert service.process is not None
            code = await service.process.wait()
            await _end_leftovers(service.process.pid)
            if self._stopping:
                return
            if not service.restart_asked:
                if code in service.spec.done_codes and service.spec.is_job:
                    service.finished.set()
                    return
                if code in service.spec.done_codes and service.spec.ends_run:
                    self._settle(None)
                    return
                if code == 0 and service.has_withdrawn():
                    self._report(f"{service.spec.name} has stopped after it was drained")
                    return
                if (full := _full_disk(service.log_file.parent)) is not None:
                    name, how = service.spec.name, service.describe_exit(code)
                    self._settle(ServiceError(f"{name} stopped ({how}): {full}"))
                    return
                if not await self._may_restart(service, code):
                    what = f"stopped: {service.describe_exit(code)}"
                    if code != EXIT_REASON:
                        what += f" ({len(service.deaths)} times)"
                    self._settle(self._error(service, what))
                    return
                why = service.complaint().partition("\n")[0] or service.describe_exit(code)
                self._report(
                    f"!! {service.spec.name} died ({why}); restarting it, "
                    f"{len(service.deaths)} of {self._max_restarts} "
                    f"(log: {service.log_file})"
                )
                await asyncio.sleep(RESTART_DELAY_S)
            service.restart_asked = False
            await self._restart(service)

    async def _may_restart(self, service: ServiceProcess, code: int) -> bool:
        now = time.monotonic()
        explained = 0 if self._explained is None else await self._explained()
        if explained > service.explained:
            service.deaths.clear()
        service.explained = max(explained, service.explained)
        service.deaths.append(now)
        while service.deaths[0] < now - self._restart_window_s:
            service.deaths.popleft()
        return (
            code not in (EXIT_REASON, EXIT_CANNOT_START)
            and len(service.deaths) <= self._max_restarts
        )

    @asynccontextmanager
    async def _turn(self, spec: ServiceSpec) -> AsyncIterator[None]:
        """Wait until no other service is starting on the same GPUs."""
        async with AsyncExitStack() as stack:
            for gpu in sorted(spec.gpus):  # in one order, so that no two wait for each other
                await stack.enter_async_context(self._turns[gpu])
            yield

    async def _restart(self, service: ServiceProcess) -> None:
        async with self._turn(service.spec):
            if self._stopping:
                return
            await self._spawn(service)
            try:
                await self._wait_until_up(service)
            except ServiceError as exc:
                if not self._stopping:
                    self._report(f"!! {exc}")
                await self._end(service)
                return
        self._report(f"{service.spec.name} is up again")
        for other in self._services.values():
            if service.spec.name in other.spec.restarts_with and other.running:
                other.restart_asked = True
                self._report(f"restarting {other.spec.name} as well")
                await self._end(other)

    async def _end(self, service: ServiceProcess) -> None:
        """Stop one service: SIGTERM, and SIGKILL when its time is up."""
        process = service.process  # its watcher may put a new one in its place meanwhile
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), service.spec.stop_timeout_s)
        except TimeoutError:
            self._report(
                f"!! {service.spec.name} did not stop within {service.spec.stop_timeout_s:g} s; "
                "killing it"
            )
            process.send_signal(signal.SIGQUIT)
            await asyncio.wait_for(process.wait(), KILL_TIMEOUT_S)
        await _end_leftovers(process.pid)

    def _settle(self, error: ServiceError | None) -> None:
        if self._outcome.done():
            return
        if error is None:
            self._outcome.set_result(None)
        else:
            self._outcome.set_exception(error)


async def _end_leftovers(session: int) -> None:
    """End what a killed subreaper left behind; a subreaper that ended by itself left nothing."""
    deadline = time.monotonic() + subreaper.LEFTOVER_GRACE_S
    sig = signal.SIGTERM
    while pids := subreaper.session_members(session):
        subreaper.signal_all(pids, sig)
        if time.monotonic() >= deadline:
            sig = signal.SIGKILL
        await asyncio.sleep(POLL_S)
