"""The learner's side of the streams: asks for rollouts, gathers scores, keeps both alive.

- consumes: `ScoredTrajectory` from the stream `scored_trajectories`;
- waits for: scores (`collect_forever`), complete groups (`next_batch`);
- unblocked by: reward's XADD; a group whose last slot became final;
- produces: `RolloutTask` on the stream `tasks`, as far as credits allow.

All three run on one event loop, and every change of the group buffer happens between two awaits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from agent_r1.learner.checkpoints.ownership import TakenOverError
from agent_r1.learner.groups import AcceptResult, Group, GroupBuffer, failure_reason
from agent_r1.learner.prompts import PromptOrder
from agent_r1.learner.stop_rules import FailureMonitor
from agent_r1_proto.failures import FailureBoard, failure, place_of_failure
from agent_r1_proto.lost_samples import LostSamples, lost_reason
from agent_r1_proto.registry import Registry
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.stream_consumer import Entry, StreamConsumer
from agent_r1_proto.streams import Broker, RedisMemory
from agent_r1_proto.tasks import RolloutKey, RolloutTask
from agent_r1_proto.weights import NewestVersion

logger = logging.getLogger(__name__)

READ_COUNT = 64
READ_BLOCK_S = 5.0
WATCH_PERIOD_S = 0.5
"""Time between two looks at overdue samples, Redis and queue depths."""
WAIT_TICK_S = 0.5
CONTACT_GRACE_S = 5.0
"""Redis that has not answered for so long is away; that time does not count as a stall."""
LOST = (
    "Redis has lost the run's data: it was emptied, or replaced by one without them",
    "nothing has to be done: the learner asks again for what was under way; see that no other "
    "program empties it (`FLUSHALL`)",
)
LISTED_TASKS = 100
KEPT_FAILURES = 64
"""Failed trajectories kept for the log of one step."""


class RolloutCollector:
    """The groups a run has asked for, and the stream traffic about them."""

    def __init__(
        self,
        *,
        broker: Broker,
        registry: Registry,
        group_buffer: GroupBuffer,
        prompts: PromptOrder,
        monitor: FailureMonitor,
        board: FailureBoard,
        next_group_id: int = 0,
        reopen: Sequence[int] = (),
        failed_tasks: Sequence[str] = (),
        groups_to_train: int,
    ) -> None:
        """Prepare the collecting of one start.

        Args:
            broker: connection to Redis.
            registry: the run's shared facts.
            group_buffer: the group slots.
            prompts: the prompt order.
            monitor: the stop rules.
            board: what the other services say of failed attempts.
            next_group_id: prompt cursor.
            reopen: groups that an earlier start had asked for and not trained; issued first.
            failed_tasks: what an earlier start listed.
            groups_to_train: groups the rest of the run will train; no more are asked for.
        """
        self.groups = group_buffer
        self.next_group_id = next_group_id
        self.depths: dict[str, int] = {}
        """Entries waiting or in flight, per stream, and dead letters that are kept."""
        self.waiting: dict[str, int] = {}
        """Entries that no consumer has taken, per stream."""
        self.redis_memory = RedisMemory()
        self.failed_tasks = list(failed_tasks)
        """Ids of tasks of which a sample failed for good, the first `LISTED_TASKS`."""
        self._dead_letters = 0
        """Entries that were dead-lettered, as of the last look."""
        self._broker = broker
        self._lost = LostSamples(broker)
        self._asking = 0
        """Calls of `_ask` under way: what they publish may be in no stream yet."""
        self._registry = registry
        self._prompts = prompts
        self._monitor = monitor
        self._board = board
        self._reopen = deque(reopen)
        self._groups_to_train = groups_to_train
        self._progress = asyncio.Event()
        self._last_contact = time.monotonic()
        self._failures: deque[ScoredTrajectory] = deque(maxlen=KEPT_FAILURES)

    async def start(self) -> None:
        """Take what went wrong before this start as known."""
        await self._board.start()
        self._dead_letters = await self._broker.dead_letter_count()

    def outstanding_ids(self) -> list[int]:
        """Return the groups to issue again after a resume."""
        return sorted([*self.groups.outstanding_ids(), *self._reopen])

    async def fill(self) -> None:
        """Ask for as many groups as credits and the rest of the run allow."""
        tasks: list[RolloutTask] = []
        while self.groups.room() > 0 and len(self.groups) < self._groups_to_train:
            if self._reopen:
                group_id = self._reopen.popleft()
            else:
                group_id = self.next_group_id
                self.next_group_id += 1
            tasks += self.groups.open(group_id, self._prompts.task(group_id), time.monotonic())
        await self._ask(tasks)

    async def _ask(self, tasks: Sequence[RolloutTask]) -> None:
        self._asking += 1
        try:
            await self._broker.publish_many(self._broker.keys.tasks, tasks)
        finally:
            self._asking -= 1

    async def collect_forever(self, consumer: StreamConsumer[ScoredTrajectory]) -> None:
        """Put every scored trajectory into its slot, forever.

        Raises:
            RunFailedError: a stop rule is met.
        """
        while True:
            entries = await consumer.read(READ_COUNT, READ_BLOCK_S)
            self._last_contact = time.monotonic()
            await self._leave_to_later_start(consumer, entries)
            if any(failure_reason(entry.message) is not None for entry in entries):
                await self.read_board()  # it has the traceback that the result has not
            for entry in entries:
                self._accept(entry.message)
            await consumer.finish_many(entries)
            await self.fill()  # dropped groups gave their credit back

    async def _leave_to_later_start(
        self,
        consumer: StreamConsumer[ScoredTrajectory],
        entries: Sequence[Entry[ScoredTrajectory]],
    ) -> None:
        """Give results back that a later start of the learner has asked for, and end.

        Raises:
            TakenOverError: there are some.
        """
        own = self.groups.incarnation
        keys = [entry.message.trajectory.rollout.key for entry in entries]
        later = max((k.incarnation for k in keys if k.run_id == self.groups.run_id), default=0)
        if later > own:
            for entry in entries:
                await consumer.release(entry)
            raise self._taken_over(later)

    def _accept(self, scored: ScoredTrajectory) -> None:
        trajectory = scored.trajectory
        ready = self.groups.num_ready
        outcome = self.groups.accept(scored)
        if outcome is AcceptResult.FILLED:
            self._monitor.succeeded()
            self._monitor.observe_calls(trajectory)
        elif outcome is AcceptResult.FAILED:
            self._failures.append(scored)
            self._note_lost(trajectory.rollout.task.id)
            self._monitor.saw_failed(trajectory)
            reason = failure_reason(scored) or ""
            self._monitor.failed(reason, trajectory.rollout_id, place_of_failure(trajectory))
        else:
            logger.debug("result dropped rollout_id=%s result=%s", trajectory.rollout_id, outcome)
        if self.groups.num_ready > ready:
            self._monitor.group_completed()
        self._progress.set()

    def _note_lost(self, task_id: str) -> None:
        """List a prompt of which a sample failed for good."""
        if task_id not in self.failed_tasks and len(self.failed_tasks) < LISTED_TASKS:
            logger.error("a sample of this task failed for good task_id=%s", task_id)
            self.failed_tasks.append(task_id)

    async def next_batch(self) -> list[Group]:
        """Wait for a batch of complete groups.

        Raises:
            RunFailedError: no group completed within `stall_timeout_s`.
        """
        while True:
            groups = self.groups.take_batch()
            if groups is not None:
                return groups
            self._progress.clear()
            started = time.monotonic()
            try:
                await asyncio.wait_for(self._progress.wait(), WAIT_TICK_S)
            except TimeoutError:
                now = time.monotonic()
                if now - self._last_contact < CONTACT_GRACE_S:
                    doing = (
                        f"{len(self.groups)} groups outstanding, {self.groups.num_ready} complete"
                    )
                    self._monitor.waited(now - started, doing)

    def mark_trained(self, groups: Sequence[Group]) -> None:
        """Note that groups were trained; their credits come back with `ask_for_more`."""
        self.groups.mark_trained(groups)
        self._groups_to_train -= len(groups)

    async def ask_for_more(self, credits: int) -> None:
        """Give credits of `groups.advance` back, ask for more, and count what failed so far."""
        self.groups.give_back(credits)
        await self.fill()
        await self.count_failures()

    def take_failures(self) -> list[ScoredTrajectory]:
        """Return the results since the last call that could not be trained on."""
        failures = list(self._failures)
        self._failures.clear()
        return failures

    async def watch_forever(
        self, newest: Callable[[], NewestVersion], announce: Callable[[], Awaitable[None]]
    ) -> None:
        """Issue overdue samples again, restore what Redis lost, read queue depths, forever.

        Args:
            newest: the newest version this learner has published.
            announce: publishes it in Redis again.

        Raises:
            TakenOverError: another learner has taken over the run.
        """
        while True:
            await self._watch_registry(newest, announce)
            await self.count_failures()
            overdue = self.groups.overdue(time.monotonic())
            if overdue:
                logger.warning("samples overdue, issued again count=%d", len(overdue))
                await self._ask(overdue)
            await self._ask_for_lost()
            await self._look_at_redis()
            await self._broker.wait_for_writes()  # a read-only Redis is as good as away
            self._last_contact = time.monotonic()
            await asyncio.sleep(WATCH_PERIOD_S)

    async def require_newest(self) -> int | None:
        """Return the incarnation that Redis knows.

        Raises:
            TakenOverError: it is a later one than this learner's.
        """
        own = self.groups.incarnation
        incarnation = await self._registry.incarnation()
        if incarnation is not None and incarnation > own:
            raise self._taken_over(incarnation)
        return incarnation

    def _taken_over(self, incarnation: int) -> TakenOverError:
        return TakenOverError(
            f"learner start {incarnation} has taken over this run (this is start "
            f"{self.groups.incarnation}); if it is another run, give that one its own run.id"
        )

    async def _watch_registry(
        self, newest: Callable[[], NewestVersion], announce: Callable[[], Awaitable[None]]
    ) -> None:
        own = self.groups.incarnation
        own_version = newest().policy_version
        incarnation = await self.require_newest()
        published = await self._registry.newest_version()
        lost_version = published is None or published.policy_version < own_version
        if incarnation == own and not lost_version:
            return
        logger.warning("redis lost the run's data; announcing and issuing again")
        self._monitor.redis_lost.update({"redis:emptied": LOST})
        await self._registry.set_incarnation(own)
        await announce()
        tasks = self.groups.reissue_open(time.monotonic())
        await self._ask(tasks)
        self._monitor.redis_lost.update({})

    async def _ask_for_lost(self) -> None:
        """Issue samples again that Redis has lost; none of their attempts has failed."""
        if self._asking:
            return
        # Young ones are left out: in a run that flows there are no others, and nothing to read.
        asked = self.groups.open_keys(time.monotonic(), self._broker.lease_s / 2)
        tasks = self.groups.reissue_lost(await self._lost.find(asked), time.monotonic())
        if tasks:
            reason = lost_reason(len(tasks))
            logger.warning("samples lost, issued again count=%d", len(tasks))
            self._monitor.note_attempts([(failure("learner", reason, str(tasks[0].key)), 0)])
            await self._ask(tasks)

    async def _look_at_redis(self) -> None:
        keys = self._broker.keys
        broker = self._broker
        streams = keys.stages()
        depths = {name: await broker.depth(stream) for name, (stream, _) in streams.items()}
        self.depths = {**depths, "dead_letters": await broker.depth(keys.dead_letters)}
        self.waiting = {
            name: max(0, depths[name] - await broker.pending(*one)) for name, one in streams.items()
        }
        self.redis_memory = await broker.memory()

    async def count_failures(self) -> None:
        """Read what other services say of failed attempts, and count dead letters."""
        await self.read_board()
        await self._count_dead_letters()

    async def read_board(self) -> None:
        """Show what other services say of failed attempts."""
        self._monitor.note_attempts(await self._board.read())

    async def _count_dead_letters(self) -> None:
        before, self._dead_letters = self._dead_letters, await self._broker.dead_letter_count()
        new = self._dead_letters - before
        if new > 0:  # it is less where Redis lost its data
            self.groups.counts["dead_letters"] += new
            logger.error("dead letters new=%d see=`agent-r1 status`", new)
            await self._give_up_unreadable()

    async def _give_up_unreadable(self) -> None:
        """Fail the samples of entries that no service can parse: nobody answers them."""
        for letter in await self._broker.dead_letters():
            if not letter.unreadable:
                continue
            try:
                key = RolloutKey.parse(letter.key)
            except ValueError:
                continue  # about no sample
            scored = self.groups.failed_result(key, letter.failure)
            if scored is not None:
                self._accept(scored)
        await self.fill()
