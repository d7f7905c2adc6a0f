"""The reward worker: scores trajectories as they arrive.

Reads stream `trajectories` (group `reward`), writes `scored_trajectories`, or the reply stream the
task names (evaluation, chat). Publishing, acknowledging and deleting are one step, so a worker that
dies in the middle leaves the trajectory to another. A FAILED trajectory passes unscored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent_r1.reward.scorer import ComponentError, Scorer
from agent_r1.reward.versions import GroupVersions
from agent_r1.runtime.tracing import span
from agent_r1_proto.connection import REWARD_GROUP
from agent_r1_proto.failures import REWARD_ERROR, FailureBoard, innermost_frames
from agent_r1_proto.messages import StreamMessage
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.scoring_models import ScoringModels
from agent_r1_proto.stream_consumer import Entry, StreamConsumer
from agent_r1_proto.streams import Broker
from agent_r1_proto.trajectory import Trajectory

logger = logging.getLogger(__name__)

READ_BLOCK_S = 1.0
"""Longest one read waits, so that a stop is noticed."""
STOP_GRACE_S = 5.0
"""Time that scorings in flight get on shutdown; the rest is given back."""


class _Clock:
    """The time since a trajectory ended, added to when it ended by the clock of its server.

    Machines' clocks differ, so no two are compared: Redis alone says how long an entry waited, and
    this process alone how long it has had it.

    Args:
        entry: the trajectory.
        now: time of the Redis server, which also numbers entries.
    """

    def __init__(self, entry: Entry[Trajectory], now: float) -> None:
        written_at = int(entry.entry_id.partition("-")[0]) / 1000.0
        self._ended_at = entry.message.started_at + entry.message.latency_ms / 1000.0
        self._waited_s = max(0.0, now - written_at)
        self._taken = time.monotonic()

    def time(self) -> float:
        """Return the time by the clock of the rollout server."""
        return self._ended_at + self._waited_s + time.monotonic() - self._taken


@dataclass(eq=False)
class RewardWorker:
    """One member of the consumer group that scores; `consumer_name` is unique in the run."""

    broker: Broker
    scorer: Scorer
    consumer_name: str
    max_concurrent: int = 32

    def __post_init__(self) -> None:
        self._board = FailureBoard(self.broker)
        self._versions = GroupVersions(ScoringModels(self.broker), self.scorer.asking)
        self._tasks: dict[asyncio.Task[None], Entry[Trajectory]] = {}
        self.num_scored = 0
        """Trajectories scored and passed on."""
        self.num_passed = 0
        """FAILED trajectories passed on."""
        self.num_dead = 0
        """Trajectories dead-lettered because a component failed on them."""
        self.on_scored: Callable[[float], None] = lambda seconds: None
        """Callback for the time that each scoring took."""

    @property
    def num_in_flight(self) -> int:
        """Trajectories being scored."""
        return sum(not task.done() for task in self._tasks)

    async def run(self, stop: asyncio.Event) -> None:
        """Score until `stop` is set; then finish or give back what is in flight."""
        keys = self.broker.keys
        await self._versions.start()
        async with self.broker.consumer(
            keys.trajectories, Trajectory, group=REWARD_GROUP, consumer=self.consumer_name
        ) as consumer:
            consumer.on_deadly = self._give_up_deadly
            try:
                while not stop.is_set():
                    await self._versions.follow()
                    await self._take(consumer)
            finally:
                await self._wind_up(consumer)

    async def _take(self, consumer: StreamConsumer[Trajectory]) -> None:
        room = self.max_concurrent - len(self._tasks)
        if room == 0:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        else:
            entries = await consumer.read(room, READ_BLOCK_S)
            now = await self.broker.time() if entries else 0.0
            for entry in entries:
                clock = _Clock(entry, now)
                task = asyncio.create_task(self._process(consumer, entry, clock))
                self._tasks[task] = entry
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.pop(task)
            task.result()  # what `_process` does not handle ends the worker

    async def _wind_up(self, consumer: StreamConsumer[Trajectory]) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_GRACE_S)
        for task, entry in self._tasks.items():
            if not task.done():
                task.cancel()
                logger.info("trajectory given back rollout_id=%s", entry.message.rollout_id)
                await consumer.release(entry)
        self._tasks.clear()

    async def _process(
        self, consumer: StreamConsumer[Trajectory], entry: Entry[Trajectory], clock: _Clock
    ) -> None:
        trajectory = entry.message
        consumer.note_components(entry)
        reward = None
        if trajectory.status != "FAILED":
            started = time.monotonic()
            try:
                with span("reward", trajectory.rollout.traceparent):
                    versions = await self._versions.of(trajectory.rollout)
                    reward = await self.scorer.score_trajectory(trajectory, versions)
                self.on_scored(time.monotonic() - started)
            except Exception as exc:
                logger.exception("scoring failed rollout_id=%s", trajectory.rollout_id)
                await self._fail(consumer, entry, exc, clock)
                return
        scored = ScoredTrajectory(trajectory=trajectory, reward=reward, scored_at=clock.time())
        await consumer.finish(entry, [(self._destination(trajectory), scored)])
        if reward is None:
            self.num_passed += 1
        else:
            self.num_scored += 1
        logger.debug(
            "trajectory scored rollout_id=%s status=%s reward=%s",
            trajectory.rollout_id,
            trajectory.status,
            None if reward is None else reward.total,
        )

    async def _fail(
        self,
        consumer: StreamConsumer[Trajectory],
        entry: Entry[Trajectory],
        exc: Exception,
        clock: _Clock,
    ) -> None:
        """Count a failed scoring; at the limit the sample ends as FAILED beside its dead letter."""
        trajectory = entry.message
        known = isinstance(exc, ComponentError | ValueError)
        reason = f"{REWARD_ERROR}: " + (str(exc) if known else f"{type(exc).__name__}: {exc}")
        # What our own checks say needs no traceback: it would show the check.
        raised = exc.__cause__ if known else exc
        frames = innermost_frames(raised) if raised is not None else ""
        await self._board.note("reward", f"{reason}\n{frames}", trajectory.rollout_id)
        if await consumer.fail(entry, reason, self._failed(trajectory, reason, clock.time())):
            self.num_dead += 1

    async def _give_up_deadly(
        self, trajectory: Trajectory, why: str
    ) -> Sequence[tuple[str, StreamMessage]]:
        """Let the sample of a trajectory that ends the process end as FAILED."""
        reason = f"{REWARD_ERROR}: task {trajectory.rollout.task.id!r}: its scoring {why}"
        await self._board.note("reward", reason, trajectory.rollout_id)
        self.num_dead += 1
        ended_at = trajectory.started_at + trajectory.latency_ms / 1000
        return self._failed(trajectory, reason, ended_at)

    def _failed(
        self, trajectory: Trajectory, reason: str, scored_at: float
    ) -> list[tuple[str, StreamMessage]]:
        failed = ScoredTrajectory(
            trajectory=trajectory.replace(status="FAILED", reason=reason),
            reward=None,
            scored_at=scored_at,
        )
        return [(self._destination(trajectory), failed)]

    def _destination(self, trajectory: Trajectory) -> str:
        return trajectory.rollout.reply_stream or self.broker.keys.scored
