"""The stream worker: samples from `tasks`, trajectories to `trajectories`.

Takes a sample only when it has room and holds the newest weights, runs each as a coroutine of its
own (rollout/agent_loop.py), and publishes a trajectory the moment it ends, in one MULTI with the
acknowledgement of its sample. Killed at any point, its samples go to another server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_r1.attempts.tool_transport import OUTAGES
from agent_r1.runtime.tracing import span
from agent_r1.text.tokens import EngineDeadError, PolicyError, failed_trajectory
from agent_r1.weights.manifest import WeightsRefusedError
from agent_r1_proto.failures import FailureBoard, innermost_frames
from agent_r1_proto.messages import StreamMessage
from agent_r1_proto.registry import Registry
from agent_r1_proto.stream_consumer import Entry, StreamConsumer
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.trajectory import Trajectory
from agent_r1_proto.weights import NewestVersion

logger = logging.getLogger(__name__)

READ_BLOCK_S = 0.25
"""Longest wait for a sample; also how long a shutdown may wait for the read to return."""
VERSION_POLL_S = 0.25
CATCH_UP_RETRY_S = 2.0
ON_ITS_WAY_S = 30.0
"""A version that is not held for longer is an error."""
STOP_TIMEOUT_S = 10.0
REPORT_EVERY = 100
MAX_PUBLISHING = 16
"""Trajectories published at a time: hundreds may end together, and each takes a connection."""
FREE_KINDS = {
    *(kind for kind, outage in OUTAGES.items() if outage.free_attempt),
    *("agent_bad_reply", "agent_lost", "agent_not_started", "agent_silent"),  # gateway
    *("gateway_error", "policy_error", "rollout_unavailable"),
}
"""Kinds of failures that show nothing of the policy: such attempts do not count against
`max_attempts`."""
MAX_FREE_ATTEMPTS = 20
"""Attempts of one sample that do not count, at most: instances that die all the time do count."""


def _attempt(task: RolloutTask) -> tuple[str, str | None]:
    """Return what tells attempts apart: clients number their questions alike."""
    return str(task.key), task.reply_stream


class HeldWeights(Protocol):
    """The weights that samples are drawn with."""

    @property
    def held(self) -> int:
        """Version of them."""
        ...

    async def catch_up(self, newest: NewestVersion) -> None:
        """Return once the newest version, or a later one, is held.

        Raises:
            EngineDeadError: nothing can be sampled any more.
            PolicyError: it is not held.
            WeightsRefusedError: it cannot be used.
            TimeoutError: it did not come in time.
        """
        ...


@dataclass(eq=False, kw_only=True)
class SampleWorker:
    """Works on samples of one run until it is stopped."""

    consumer: StreamConsumer[RolloutTask]
    """Consumer of the stream `tasks`; entered by the caller."""
    registry: Registry
    """Newest version and incarnation."""
    run_attempt: Callable[[RolloutTask], Awaitable[Trajectory]]
    """Runs one attempt to its end, and raises EngineDeadError where the policy dies."""
    versions: HeldWeights
    """The weights of this server, or of those that sample for it."""
    trajectories: str
    """Name of the stream that gets the results."""
    max_concurrent: int
    """Most samples worked on at a time; with 0, none is ever taken."""
    board: FailureBoard
    """Tells whoever waits of failed attempts."""

    def __post_init__(self) -> None:
        self._working: dict[asyncio.Task[None], Entry[RolloutTask]] = {}
        self._under_way: set[tuple[str, str | None]] = set()
        """Attempts being made, by key and reply stream."""
        self._repeats = 0
        self._changed = asyncio.Event()
        self._publishing = asyncio.Semaphore(MAX_PUBLISHING)
        self._awaited: tuple[int, float] | None = None
        """Version that is not held, and since when."""
        self._stopping = False
        self._draining = False
        self._fatal: EngineDeadError | None = None
        self.consumer.on_deadly = self._give_up_deadly
        self._failures: Counter[str] = Counter()
        """FAILED attempts by kind."""
        self.on_attempt: Callable[[Trajectory, bool], None] = lambda trajectory, published: None
        """Callback for each attempt that has ended, and whether its trajectory is published."""

    @property
    def in_flight(self) -> int:
        """Samples being worked on."""
        return len(self._working)

    @property
    def _takes_no_more(self) -> bool:
        return self._stopping or self._draining

    def stop(self) -> None:
        """Take no more samples and let `run` return; samples in flight are given back."""
        self._stopping = True
        self._changed.set()

    def drain(self) -> None:
        """Take no more samples, and let `run` return when those in flight have ended."""
        self._draining = True
        self._changed.set()

    async def run(self) -> None:
        """Work until `stop`, or after `drain` to the end of the samples in flight.

        Raises:
            EngineDeadError: the policy cannot sample any more; everything in flight is given back.
        """
        up_to_date = False
        try:
            while not self._stopping and (self.in_flight or not self._draining):
                if self._draining or self.in_flight >= self.max_concurrent:
                    await self._wait_for_change()
                    continue
                # Samples that were just taken have shown that the newest version is held.
                if not up_to_date and not await self._holds_newest():
                    continue
                room = self.max_concurrent - self.in_flight
                entries = await self.consumer.read(room, READ_BLOCK_S)
                up_to_date = bool(entries) and await self._start(entries)
            if self._fatal is not None:
                raise self._fatal
        finally:
            await self._give_back()

    # -- taking samples --------------------------------------------------------------------------

    async def _wait_for_change(self, timeout_s: float | None = None) -> None:
        """Wait until a sample ends or the worker is stopped."""
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _holds_newest(self) -> bool:
        """Make sure the newest version is known and held; False means ask again."""
        newest = await self.registry.newest_version()
        if newest is None:
            await self._wait_for_change(VERSION_POLL_S)
            return False
        try:
            await self.versions.catch_up(newest)
        except EngineDeadError as exc:
            self._die(exc)
            return False
        except (PolicyError, WeightsRefusedError, TimeoutError) as exc:
            logger.log(
                self._how_loud(newest.policy_version),
                "server stays behind and takes no samples held=%d policy_version=%d error=%s",
                self.versions.held,
                newest.policy_version,
                exc,
            )
            await self._wait_for_change(CATCH_UP_RETRY_S)
            return False
        return True

    def _how_loud(self, version: int) -> int:
        """Return at which level to say that a version is not held: it may be on its way."""
        if self._awaited is None or self._awaited[0] != version:
            self._awaited = version, time.monotonic()
        return logging.ERROR if time.monotonic() - self._awaited[1] > ON_ITS_WAY_S else logging.INFO

    async def _start(self, entries: list[Entry[RolloutTask]]) -> bool:
        """Start the samples that are still wanted, under weights that are the newest now.

        Returns:
            Whether this server holds those.

        The learner sets the newest version before it issues samples, so a version read after a
        sample is never older than the one the sample was issued for. A server that is behind gives
        its samples back, for servers that hold it.
        """
        newest, incarnation = await self.registry.newest()
        wanted: list[Entry[RolloutTask]] = []
        for entry in entries:
            task = entry.message
            is_old = incarnation is not None and task.key.incarnation < incarnation
            if is_old and task.purpose == "train":
                logger.debug("sample of an earlier incarnation dropped rollout_id=%s", task.key)
                await self.consumer.finish(entry)
            else:
                wanted.append(entry)
        is_behind = newest is None or newest.policy_version > self.versions.held
        for entry in wanted:
            if self._takes_no_more or is_behind:  # to get the weights may take long
                await self.consumer.release(entry)
                continue
            if _attempt(entry.message) in self._under_way:
                await self._drop_repeat(entry)
                continue
            self._under_way.add(_attempt(entry.message))
            work = asyncio.create_task(self._work(entry))
            self._working[work] = entry
            work.add_done_callback(self._ended)
        return not is_behind

    async def _drop_repeat(self, entry: Entry[RolloutTask]) -> None:
        """Drop an entry that asks for an attempt under way: its answer is the other's."""
        self._repeats += 1
        logger.log(
            logging.WARNING if self._repeats == 1 else logging.DEBUG,
            "sample asked for twice; the second entry is dropped rollout_id=%s count=%d",
            entry.message.key,
            self._repeats,
        )
        await self.consumer.finish(entry)

    async def drop_earlier_incarnations(self) -> None:
        """Cancel and drop training samples in flight that an earlier learner start issued."""
        incarnation = await self.registry.incarnation()
        if incarnation is None:
            return
        for work, entry in list(self._working.items()):
            task = entry.message
            if task.purpose == "train" and task.key.incarnation < incarnation:
                work.cancel()
                await asyncio.wait([work])
                if work.cancelled():
                    await self.consumer.finish(entry)

    # -- working ---------------------------------------------------------------------------------

    async def _work(self, entry: Entry[RolloutTask]) -> None:
        """Run the attempts of one sample and publish the last."""
        task = entry.message
        self.consumer.note_components(entry)
        free = 0
        try:
            while True:
                with span("rollout", task.traceparent, rollout_id=str(task.key)):
                    trajectory = await self.run_attempt(task)
                if trajectory.status != "FAILED":
                    break
                kind = trajectory.reason.partition(":")[0]
                free += kind in FREE_KINDS and free < MAX_FREE_ATTEMPTS
                final = task.key.attempt + 1 - free >= task.max_attempts
                await self._note_failure(trajectory, final=final)
                if final:
                    break
                self.on_attempt(trajectory, False)
                task = self._next_attempt(task)
            async with self._publishing:
                await self.consumer.finish(entry, [(self.trajectories, trajectory)])
            self.on_attempt(trajectory, True)
            self._log_published(trajectory)
        except EngineDeadError as exc:
            self._die(exc)
            await self.consumer.release(entry)
        except Exception as exc:
            logger.exception("sample could not be processed rollout_id=%s", task.key)
            await self._fail(entry, task, exc)
        finally:
            self._under_way.discard(_attempt(task))

    def _next_attempt(self, task: RolloutTask) -> RolloutTask:
        """Return the next attempt that is not under way: the learner may have asked for one."""
        self._under_way.discard(_attempt(task))
        while True:
            key = task.key.model_copy(update={"attempt": task.key.attempt + 1})
            task = task.model_copy(update={"key": key})
            if _attempt(task) not in self._under_way:
                self._under_way.add(_attempt(task))
                return task

    @staticmethod
    def _log_published(trajectory: Trajectory) -> None:
        logger.info(
            "trajectory published rollout_id=%s group_id=%d status=%s reason=%s num_turns=%d "
            "num_tokens=%d policy_versions=%s latency_ms=%.0f",
            trajectory.rollout_id,
            trajectory.rollout.key.group_id,
            trajectory.status,
            trajectory.reason,
            len(trajectory.turns),
            len(trajectory.token_ids),
            trajectory.policy_versions(),
            trajectory.latency_ms,
        )

    async def _note_failure(self, trajectory: Trajectory, *, final: bool) -> None:
        """Log the first failed attempt of each kind at once, then now and then; tell the board."""
        kind = ": ".join(trajectory.reason.split(": ")[:2])
        self._failures[kind] += 1
        count = self._failures[kind]
        errors = [call.error for call in trajectory.calls() if call.status == "failed"]
        logger.log(
            logging.WARNING if count == 1 or count % REPORT_EVERY == 0 else logging.DEBUG,
            "attempt failed rollout_id=%s reason=%s count=%d final=%s detail=%s",
            trajectory.rollout_id,
            trajectory.reason,
            count,
            final,
            errors[-1] if errors else "none",
        )
        detail = [error for error in errors[-1:] if error not in trajectory.reason]
        reason = "\n".join([trajectory.reason, *detail])
        await self.board.note("rollout", reason, trajectory.rollout_id)

    async def _fail(self, entry: Entry[RolloutTask], task: RolloutTask, exc: Exception) -> None:
        """Count a defect of ours; at the limit the sample ends as FAILED beside its dead letter."""
        reason = f"rollout_error: {type(exc).__name__}: {exc}"
        await self.board.note("rollout", f"{reason}\n{innermost_frames(exc)}", str(task.key))
        failed = failed_trajectory(task, reason)
        await self.consumer.fail(entry, reason, [(self.trajectories, failed)])

    async def _give_up_deadly(
        self, task: RolloutTask, why: str
    ) -> Sequence[tuple[str, StreamMessage]]:
        """Let a sample that ends the process end as FAILED."""
        reason = f"rollout_error: task {task.task.id!r}: its rollout {why}"
        await self.board.note("rollout", reason, str(task.key))
        return [(self.trajectories, failed_trajectory(task, reason))]

    def _die(self, exc: EngineDeadError) -> None:
        if self._fatal is None:
            logger.error("policy is dead; giving every sample back error=%s", exc)
        self._fatal = exc
        self.stop()

    def _ended(self, work: asyncio.Task[None]) -> None:
        self._working.pop(work, None)
        self._changed.set()
        if not work.cancelled() and work.exception() is not None:
            logger.error("sample ended with an error", exc_info=work.exception())

    async def _give_back(self) -> None:
        """Cancel what is in flight and release its entries for other servers."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await asyncio.gather(
                    *(self._give_back_one(*sample) for sample in self._working.items())
                )
        except TimeoutError:
            logger.warning(
                "samples not given back within %g s; others get them when their lease ends",
                STOP_TIMEOUT_S,
            )

    async def _give_back_one(self, work: asyncio.Task[None], entry: Entry[RolloutTask]) -> None:
        work.cancel()
        await asyncio.wait([work])
        if work.cancelled():
            await self.consumer.release(entry)
