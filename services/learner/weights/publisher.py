"""The publisher: brings new weights to the rollout servers, which pull them.

Takes the weights into memory, from where training goes on; publishes them (a snapshot that the
transport offers, or the memory itself, and the newest version in Redis); and POSTs `LoadRequest` to
every announced rollout server, until at least one has the version. Servers that are behind or start
late catch up by themselves. A canary follows each push.

Every phase has a timeout, so that no push can hang the learner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from functools import partial
from typing import Self

from agent_r1.learner.checkpoints.ledger import Ledger
from agent_r1.learner.checkpoints.ownership import TakenOverError
from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.engine.interface import PolicyEngine, TrainSample
from agent_r1.learner.run_spec import RunSpec
from agent_r1.learner.server import LearnerServer
from agent_r1.learner.shutdown import cancel_and_wait
from agent_r1.learner.stop_rules import RunFailedError
from agent_r1.learner.weights.canary import (
    MEAN_DLOGP,
    CanaryBounds,
    CanaryError,
    CanaryPrompt,
    CanaryReading,
    canary_request,
    choose_tokens,
    compare,
    judge,
)
from agent_r1.learner.weights.delivery import Delivery, PushReport
from agent_r1.learner.weights.servers import ServerClient, ServerError
from agent_r1.runtime.files.disk_space import readable_size, require_room
from agent_r1.runtime.http.token import find_token
from agent_r1.weights.collective import CollectiveTransport
from agent_r1.weights.file import FileTransport
from agent_r1.weights.http import HttpTransport
from agent_r1.weights.manifest import Published, SnapshotTransport, Transport
from agent_r1.weights.snapshot import write_snapshot
from agent_r1_proto.registry import Registry, RolloutServer
from agent_r1_proto.weights import (
    CanaryReply,
    NewestVersion,
)

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""Time between two looks at the announced servers while none has the new version."""
LOUD_S = 15.0
"""Time between two reports of waiting for a rollout server."""
UNUSABLE = 422
"""HTTP status of a server that has found a version's files damaged, or does not understand them."""
MAX_REFUSALS = 3
"""A push that servers answered with an error so often, and never loaded, ends the run."""


def make_transport(config: LearnerConfig, server: LearnerServer) -> Transport:
    """Return the transport that the configuration names, not yet open."""
    if config.transport == "file":
        return FileTransport()
    if config.transport == "collective":
        listen = config.server.host, config.collective_port
        backend, limit_s = config.collective_backend, config.push_timeout_s
        return CollectiveTransport(server, listen, backend, limit_s)
    return HttpTransport(server, dense_every=config.dense_every if config.push == "delta" else 1)


class ServersAheadError(RunFailedError):
    """Every rollout server holds a higher version than the one that was published."""


def prepare_weights_dir(spec: RunSpec, snapshot_bytes: int) -> None:
    """Remove what a learner that was killed left unfinished; refuse versions that will not fit.

    Raises:
        ValueError: free space is below keep_versions + 1 (one is written before an old one is
            deleted), those already there counted.
    """
    for unfinished in spec.weights_dir.glob(".v*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    if spec.learner.transport == "collective":
        return  # which writes none
    keep = spec.learner.keep_versions
    missing = max(0, keep + 1 - len(list(spec.weights_dir.glob("v*"))))
    require_room(
        f"{missing} weight versions of {readable_size(snapshot_bytes)}",
        spec.weights_dir,
        missing * snapshot_bytes,
        f"set learner.weights_dir to a larger disk, or lower learner.keep_versions ({keep})",
    )


class WeightPublisher:
    """Pushes weight versions to the rollout servers; use as `async with`."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        engine: PolicyEngine,
        engine_thread: Executor,
        registry: Registry,
        ledger: Ledger,
        server: LearnerServer,
        canary_floor: float | None,
    ) -> None:
        self._engine = engine
        self._engine_thread = engine_thread
        self._registry = registry
        self._ledger = ledger
        self._weights_dir = spec.weights_dir.absolute()
        self._run_id = spec.run.id
        token = find_token(spec.run)
        self._config = config = spec.learner
        self._servers = ServerClient(config, token)
        self._bounds = CanaryBounds(
            dtype=spec.model.dtype,
            mean_dlogp=config.canary_mean_dlogp or MEAN_DLOGP[spec.model.dtype],
            fail_factor=config.canary_fail_factor,
            warn_factor=config.canary_warn_factor,
        )
        self.newest = NewestVersion(policy_version=0)
        self.canary_floor = canary_floor
        self.canary_max_dlogp: float | None = None
        """Largest |difference| of any canary."""
        self.canary_warnings = 0
        """Canaries out of bounds that did not end the run."""
        self._pushes = 0
        self._published = PushReport(0)
        """The push of the newest version."""
        self.transport = make_transport(config, server)
        self._delivery = Delivery(config, self._servers, self.transport, self._ask_canary)
        self._sending_to_late: asyncio.Task[None] | None = None
        """Between two pushes, with a transport that sends from memory."""
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Open the HTTP client and the transport."""
        await self._open.enter_async_context(self.transport)
        await self._open.enter_async_context(self._servers)
        self._begin_sending_to_late()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Give up on servers that are still loading; close the HTTP client and the transport."""
        if self._sending_to_late is not None:
            await cancel_and_wait({self._sending_to_late})
        await self._delivery.close()
        await self._open.aclose()

    async def announce(self) -> None:
        """Set the newest version in Redis (again, if Redis lost it)."""
        await self._registry.set_newest_version(self.newest)

    async def push(self, canary: Sequence[TrainSample] = ()) -> PushReport:
        """Publish the engine's weights as the next version and bring them to the servers.

        Servers that announce themselves only now may hold a higher version, of a folder that this
        one is a copy of: then the weights get a number above it.

        Raises:
            RunFailedError, CanaryError, DiskFullError: as `take`, `publish` and `deliver`.
        """
        while True:
            report = await self.take(canary)
            await self.publish(report)
            try:
                return await self.deliver(report)
            except ServersAheadError as exc:
                logger.warning("servers hold a higher version, publishing again error=%s", exc)

    async def take(self, canary: Sequence[TrainSample] = ()) -> PushReport:
        """Take the engine's weights as the next version; then the engine may train on.

        Args:
            canary: of `canary_samples`, to compare log-probabilities on; none is no canary.

        Raises:
            CanaryError: a server that took long to load an earlier version is out of bounds.
            TakenOverError: a later start of the learner is at work.
        """
        self._delivery.raise_stragglers()
        started, loop = time.monotonic(), asyncio.get_running_loop()
        known = await self._registry.known_numbers()
        version = await loop.run_in_executor(
            self._engine_thread, self._ledger.next_policy_version, known.policy_version
        )
        weights = await loop.run_in_executor(self._engine_thread, self._engine.weights)
        report = PushReport(version, weights, started, canary_floor=self.canary_floor)
        report.gather_s = time.monotonic() - started
        self._pushes += 1
        if canary and self._pushes % self._config.canary_every == 0:
            predicting = time.monotonic()
            report.canary = await self._choose_tokens(canary)
            report.predict_s = time.monotonic() - predicting
        return report

    async def publish(self, report: PushReport) -> None:
        """Make a version that was taken the newest one, which servers may load.

        Raises:
            DiskFullError: the snapshot does not fit.
            TakenOverError: a later start of the learner is at work.
        """
        started = time.monotonic()
        await self._end_sending_to_late()
        published = await self._write(report)
        report.size_bytes = published.size_bytes
        version = report.policy_version
        newest = NewestVersion(policy_version=version, manifest_location=published.location)
        own = self._ledger.last_incarnation
        if later := await self._registry.publish_version(newest, own):
            raise TakenOverError(
                f"learner start {later} has taken over this run (this is start {own}); policy "
                f"version {version} was not published"
            )
        self.newest, self._published = newest, report
        report.write_s = time.monotonic() - started

    async def deliver(self, report: PushReport) -> PushReport:
        """Bring the version published last to the servers; return when at least one has it.

        Raises:
            RunFailedError: no server took the version in time.
            CanaryError: a server's log-probabilities are out of bounds and the action is `fail`.
        """
        await self._deliver(report)
        report.weights = None
        self._begin_sending_to_late()
        await asyncio.to_thread(self._delete_old)
        report.total_s = time.monotonic() - report.started
        report.bytes_sent = self.transport.take_bytes_sent()
        logger.info(
            "weights pushed policy_version=%d servers=%d size_bytes=%d bytes_sent=%d gather_s=%.3f "
            "write_s=%.3f total_s=%.3f pause_s=%.3f",
            report.policy_version,
            report.servers,
            report.size_bytes,
            report.bytes_sent,
            report.gather_s,
            report.write_s,
            report.total_s,
            report.pause_s,
        )
        return report

    async def _write(self, report: PushReport) -> Published:
        version, weights, adapter = report.policy_version, report.weights, self._engine.adapter
        assert weights is not None
        if isinstance(self.transport, CollectiveTransport):
            holding = partial(self.transport.hold, self._run_id, version, weights, adapter)
            return await asyncio.to_thread(holding)
        assert isinstance(self.transport, SnapshotTransport)
        directory = self._weights_dir / f"v{version}"
        writing = partial(write_snapshot, directory, self._run_id, version, weights)
        await asyncio.to_thread(writing, adapter=adapter)
        return await self.transport.publish(version, directory)

    async def _write_again(self, report: PushReport) -> None:
        """Replace the files of a version that a server could not use: the disk may have erred."""
        version = report.policy_version
        logger.warning("weights are written again policy_version=%d", version)
        await asyncio.to_thread(shutil.rmtree, self._weights_dir / f"v{version}", True)
        await self._write(report)

    async def _choose_tokens(self, samples: Sequence[TrainSample]) -> list[CanaryPrompt]:
        predictions = await asyncio.get_running_loop().run_in_executor(
            self._engine_thread, self._engine.predictions, samples
        )
        return choose_tokens(samples, predictions, self._config.canary_tokens)

    async def _deliver(self, report: PushReport) -> None:
        deadline = time.monotonic() + self._config.stall_timeout_s
        next_word = time.monotonic() + LOUD_S
        problems: dict[str, str] = {}
        refusals, written_again, broken = 0, False, False
        while True:
            servers = await self._registry.rollout_servers()
            if servers and all(s.policy_version > report.policy_version for s in servers):
                raise ServersAheadError(
                    f"no rollout server took policy version {report.policy_version}: all hold a "
                    f"higher one, such as {servers[0].policy_version}; resume the run, which then "
                    "goes on above it"
                )
            fit = [server for server in servers if server.server_id not in self._delivery.slow]
            alone = broken or not fit
            errors, broken = await self._delivery.load_on(
                servers if alone else fit, report, self._location, alone=alone
            )
            if report.servers:
                return
            broken |= len(fit) < len(servers)  # better a slow one than none
            problems |= {name: str(error) for name, error in errors.items()}
            refusals += any(error.refused for error in errors.values())
            if not written_again and any(error.status == UNUSABLE for error in errors.values()):
                written_again = True
                await self._write_again(report)
            if refusals >= MAX_REFUSALS or time.monotonic() > deadline:
                raise RunFailedError(
                    f"no rollout server took policy version {report.policy_version}: "
                    + ("; ".join(problems.values()) or "none is announced")
                )
            if time.monotonic() > next_word:
                logger.warning(
                    "waiting for a rollout server that takes the weights policy_version=%d "
                    "announced=%d problems=%s",
                    report.policy_version,
                    len(servers),
                    "; ".join(problems.values()) or "none",
                )
                next_word = time.monotonic() + LOUD_S
            await asyncio.sleep(POLL_S)

    def _begin_sending_to_late(self) -> None:
        if isinstance(self.transport, CollectiveTransport):
            self._sending_to_late = asyncio.create_task(self._send_to_late())

    async def _end_sending_to_late(self) -> None:
        """Give up what late servers have not got yet: no push waits for one of them."""
        if (sending := self._sending_to_late) is not None:
            await cancel_and_wait({sending})
            if not sending.cancelled():
                sending.result()

    async def _send_to_late(self) -> None:
        """Send the newest version to servers that do not have it, each by itself, for ever.

        Their failures are tried again; what must end the run surfaces at the next push.
        """
        seen: set[tuple[str, int]] = set()
        while True:
            await asyncio.sleep(POLL_S)
            newest = self.newest.policy_version
            if newest == 0:
                continue
            servers = await self._registry.rollout_servers()
            behind = [server for server in servers if server.policy_version < newest]
            # Twice: what a server has just loaded, it may have yet to announce.
            late = [server for server in behind if (server.server_id, newest) in seen]
            seen = {(server.server_id, newest) for server in behind}
            if late:
                pushed = self._published
                report = PushReport(newest, canary=pushed.canary, size_bytes=pushed.size_bytes)
                await self._delivery.load_on(
                    late, report, self._location, alone=True, until_sent=True
                )
                seen = set()

    @property
    def _location(self) -> str:
        """Of the newest version's manifest."""
        location = self.newest.manifest_location
        assert location is not None
        return location

    async def check_canary(self, samples: Sequence[TrainSample]) -> list[CanaryReading]:
        """Compare every server that holds the newest version with the learner, without a push.

        Raises:
            CanaryError: a reading is out of bounds and the action is `fail`.
        """
        prompts = await self._choose_tokens(samples)
        version = self.newest.policy_version
        servers = await self._registry.rollout_servers()
        current = [server for server in servers if server.policy_version == version]
        answers = await asyncio.gather(
            *(self._ask_canary(server, prompts, version) for server in current),
            return_exceptions=True,
        )
        readings: list[CanaryReading] = []
        for answer in answers:
            if isinstance(answer, ServerError):
                logger.warning("canary not answered error=%s", answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                readings.append(answer)
        if self.canary_floor is None and readings:
            self.canary_floor = max(reading.mean for reading in readings)
        return readings

    async def _ask_canary(
        self, server: RolloutServer, prompts: Sequence[CanaryPrompt], version: int
    ) -> CanaryReading | None:
        request = canary_request(prompts)
        reading: CanaryReading | None = None
        limit_s = self._config.push_timeout_s
        try:
            reply = await self._servers.post(
                server, "/weights/canary", request, CanaryReply, limit_s
            )
            if reply.policy_version != version:
                return None  # the server has moved on to newer weights
            reading = compare(prompts, reply.logprobs)
        except CanaryError as exc:
            verdict, text = "fail", str(exc)
        except ServerError as exc:
            if not exc.refused:
                raise
            verdict, text = "fail", f"it cannot score them ({exc})"
        else:
            self.canary_max_dlogp = max(self.canary_max_dlogp or 0.0, reading.max)
            verdict, text = judge(reading, self._bounds, self.canary_floor)
        logger.debug("canary server_id=%s policy_version=%d %s", server.server_id, version, text)
        if verdict == "ok":
            return reading
        message = (
            f"canary: rollout server {server.server_id} does not sample with the learner's "
            f"weights of policy version {version}: {text}"
        )
        if verdict == "fail" and self._config.canary_action == "fail":
            raise CanaryError(
                f'{message}; restart that server, or set learner.canary_action = "warn" to continue'
            )
        self.canary_warnings += 1
        logger.warning("%s", message)
        return reading

    async def wait_for_server(self) -> None:
        """Wait until a rollout server has announced itself.

        Raises:
            RunFailedError: none did within `first_server_timeout_s`.
        """
        started = time.monotonic()
        next_word = started + LOUD_S
        while not await self._registry.rollout_servers():
            waited = time.monotonic() - started
            if waited > self._config.first_server_timeout_s:
                raise RunFailedError(
                    f"no rollout server announced itself for {waited:.0f} s; "
                    "learner.first_server_timeout_s allows "
                    f"{self._config.first_server_timeout_s:g} s; see the log of the rollout service"
                )
            if time.monotonic() > next_word:
                logger.warning("waiting for a rollout server waited_s=%.0f", waited)
                next_word += LOUD_S
            await asyncio.sleep(POLL_S / 4)

    def _delete_old(self) -> None:
        """Delete all but the newest versions; best effort, the next push tries again."""
        versions: list[int] = []
        for path in self._weights_dir.glob("v*"):
            with contextlib.suppress(ValueError):
                versions.append(int(path.name[1:]))
        for version in sorted(versions)[: -self._config.keep_versions]:
            self.transport.withdraw(version)
            shutil.rmtree(self._weights_dir / f"v{version}", ignore_errors=True)
