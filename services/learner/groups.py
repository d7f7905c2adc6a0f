"""Group slots: what the learner has asked for and what has come back. Pure: no clock, no Redis.

collector.py opens a group (one prompt, `group_size` samples), hands in every scored trajectory that
comes back, and takes complete groups out as batches. Each (group, sample) slot is filled once: the
first final result wins, whatever its attempt; everything else is counted and dropped.

Age discards nothing: to drop what took long, or to ask for it again, is to train on what is
answered fast. Batches take the oldest complete groups first. A group that would be older than
`max_staleness` in the batch after is at its last chance, and the batch waits for it as long as
rollout has younger groups to work on; then it goes without, and the late group is trained as soon
as it is complete, with its importance weights.

Credits: at most `(max_staleness + 1) * groups_per_batch` groups are outstanding. A group holds its
credit from `open` until it is dropped, or until the weights trained on it are published
(`advance`): a prompt asked for in between would be answered by weights one step older.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from agent_r1.learner.config import LearnerConfig
from agent_r1.runtime.tracing import begin_trace
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.tasks import RolloutKey, RolloutTask, SamplingParameters, Task
from agent_r1_proto.trajectory import Trajectory


class AcceptResult(StrEnum):
    """Fate of a result that was handed in."""

    FILLED = "filled"
    FAILED = "failed"
    """The slot is final without a trajectory to train on."""
    DUPLICATE = "duplicate"
    """The slot was final already, or its group trained or dropped."""
    OLD_INCARNATION = "old_incarnation"
    FOREIGN = "foreign"
    """Outcome of a result that is not one of this run's samples: another run id, or a sample index
    that does not exist."""


@dataclass
class Slot:
    """One sample of a group."""

    issued_at: float
    attempt: int = 0
    final: bool = False
    result: ScoredTrajectory | None = None
    """Final result; None while there is none, and for a final slot without a trajectory to train
    on."""


@dataclass
class Group:
    """One prompt and its samples."""

    group_id: int
    task: Task
    opened_version: int
    """Newest policy version when it was opened: no token of it was sampled by an older one."""
    slots: list[Slot]
    has_greedy: bool = False
    """The last slot is the greedy answer, which is compared with and not trained on."""
    failures: list[ScoredTrajectory] = field(default_factory=list)
    """Final results that are not trained on."""

    @property
    def complete(self) -> bool:
        """Every slot is final."""
        return all(slot.final for slot in self.slots)

    @property
    def survivors(self) -> list[ScoredTrajectory]:
        """The trajectories to train on, by sample index."""
        slots = self.slots[:-1] if self.has_greedy else self.slots
        return [slot.result for slot in slots if slot.result is not None]

    @property
    def greedy(self) -> ScoredTrajectory | None:
        """The greedy answer; None when there is none."""
        return self.slots[-1].result if self.has_greedy else None


def staleness(trajectory: Trajectory, newest_version: int) -> int:
    """Return newest published version - lowest version among the trajectory's trained tokens."""
    versions = trajectory.policy_versions(trajectory.trained_mask())
    return max(0, newest_version - versions[0]) if versions else 0


def total_reward(scored: ScoredTrajectory) -> float:
    """Return outcome reward plus process rewards of a trajectory that did not fail."""
    assert scored.reward is not None
    return scored.reward.total + scored.trajectory.process_reward()


def failure_reason(scored: ScoredTrajectory) -> str | None:
    """Return why a result cannot be trained on; None when it can."""
    trajectory = scored.trajectory
    if trajectory.status == "FAILED":
        return trajectory.reason or "failed without a reason"
    if scored.reward is None:
        return "the reward service gave no reward"
    if trajectory.num_action_tokens == 0:
        return f"no token was sampled ({trajectory.reason})"
    if not trajectory.trained_mask().any():
        reasons = ", ".join(sorted({lineage.excluded for lineage in trajectory.lineages}))
        return f"every lineage is excluded ({reasons})"
    return None


class GroupBuffer:
    """Every group that was asked for and is neither trained nor dropped."""

    def __init__(self, config: LearnerConfig, *, run_id: str, incarnation: int) -> None:
        self.run_id = run_id
        self.incarnation = incarnation
        self.newest_version = 0
        self._config = config
        self.counts: Counter[str] = Counter()
        """Results by what became of them; `reissued` samples, those of them that Redis had `lost`,
        dropped and equal groups."""
        self._sampling = SamplingParameters(
            temperature=config.temperature, max_turns=config.max_turns
        )
        self._max_outstanding = (config.max_staleness + 1) * config.groups_per_batch
        self._groups: dict[int, Group] = {}
        self._ready: list[int] = []
        """Complete groups worth training on, oldest first."""
        self._taken: set[int] = set()
        self._held = 0
        """Credits of groups that were trained, until the new weights are published."""
        self.on_complete: Callable[[Group], None] = lambda group: None
        """Callback for each group that could be trained on, dropped for equal rewards or not."""
        self._equal_dropped = 0
        """Groups dropped for equal rewards since the last batch was taken."""

    def __len__(self) -> int:
        """Return the number of groups neither trained nor dropped."""
        return len(self._groups)

    @property
    def num_ready(self) -> int:
        """Complete groups that wait for a batch."""
        return len(self._ready)

    def room(self) -> int:
        """Return how many groups may be opened now."""
        return self._max_outstanding - len(self._groups) - self._held

    def outstanding_ids(self) -> list[int]:
        """Return the ids of the groups that are neither trained nor dropped, lowest first."""
        return sorted(self._groups)

    def open(self, group_id: int, task: Task, now: float) -> list[RolloutTask]:
        """Take one credit, of which there is `room`, and return the samples to ask for."""
        assert self.room() > 0
        assert group_id not in self._groups
        slots = [Slot(issued_at=now) for _ in range(self._config.slots_per_group)]
        group = Group(
            group_id, task, self.newest_version, slots, has_greedy=self._config.has_greedy_baseline
        )
        self._groups[group_id] = group
        return [self._task(group, index) for index in range(len(slots))]

    def _key(self, group: Group, sample_index: int) -> RolloutKey:
        return RolloutKey(
            run_id=self.run_id,
            incarnation=self.incarnation,
            group_id=group.group_id,
            sample_index=sample_index,
            attempt=group.slots[sample_index].attempt,
        )

    def _task(self, group: Group, sample_index: int) -> RolloutTask:
        attempt = group.slots[sample_index].attempt
        sampling = self._sampling
        if sample_index == self._config.group_size:
            sampling = sampling.model_copy(update={"temperature": 0.0})
        return RolloutTask(
            key=self._key(group, sample_index),
            group_size=self._config.slots_per_group,
            task=group.task,
            purpose="train",
            sampling=sampling,
            max_attempts=attempt + self._config.max_attempts,
            traceparent=begin_trace(
                "sample", group_id=group.group_id, sample_index=sample_index, attempt=attempt
            ),
        )

    def accept(self, scored: ScoredTrajectory) -> AcceptResult:
        """Fill a slot with a final result, or say why it is dropped."""
        outcome = self._judge(scored)
        self.counts[outcome] += 1
        if outcome not in (AcceptResult.FILLED, AcceptResult.FAILED):
            return outcome
        key = scored.trajectory.rollout.key
        group = self._groups[key.group_id]
        slot = group.slots[key.sample_index]
        slot.final = True
        if outcome is AcceptResult.FILLED:
            slot.result = scored
            self.counts["retried"] += key.attempt > 0
        else:
            group.failures.append(scored)
        if group.complete:
            self._close(group)
        return outcome

    def failed_result(self, key: RolloutKey, reason: str) -> ScoredTrajectory | None:
        """Return a FAILED result for a sample nobody will answer; None if none is awaited."""
        group = self._groups.get(key.group_id)
        known = group is not None and key.sample_index < len(group.slots)
        own = (key.run_id, key.incarnation) == (self.run_id, self.incarnation)
        if group is None or not known or not own or group.slots[key.sample_index].final:
            return None
        rollout = self._task(group, key.sample_index)
        empty = Trajectory(
            rollout=rollout,
            token_ids=np.zeros(0, np.int32),
            action_mask=np.zeros(0, np.bool_),
            rollout_logprobs=np.zeros(0, np.float32),
            prompt_length=0,
            status="FAILED",
            reason=reason,
            seed=0,
            temperature=rollout.sampling.temperature,
        )
        return ScoredTrajectory(trajectory=empty, reward=None)

    def _judge(self, scored: ScoredTrajectory) -> AcceptResult:
        trajectory = scored.trajectory
        key = trajectory.rollout.key
        if key.run_id != self.run_id or trajectory.rollout.purpose != "train":
            return AcceptResult.FOREIGN
        if key.incarnation != self.incarnation:
            return AcceptResult.OLD_INCARNATION
        if key.sample_index >= self._config.slots_per_group:
            return AcceptResult.FOREIGN
        group = self._groups.get(key.group_id)
        if group is None or group.slots[key.sample_index].final:
            return AcceptResult.DUPLICATE
        return AcceptResult.FILLED if failure_reason(scored) is None else AcceptResult.FAILED

    def _usable(self, group: Group) -> bool:
        """Return whether enough of a complete group is left to train on."""
        has_baseline = group.greedy is not None or not group.has_greedy
        fewest = min(2, self._config.group_size)  # one alone has no advantage
        return len(group.survivors) >= fewest and has_baseline

    def _close(self, group: Group) -> None:
        if not self._usable(group):
            self._drop(group)
            return
        self.on_complete(group)
        if self._teaches_nothing(group):
            self._equal_dropped += 1
            self.counts["equal_groups"] += 1
            del self._groups[group.group_id]
        else:
            bisect.insort(self._ready, group.group_id, key=self._age_key)

    def _age_key(self, group_id: int) -> tuple[int, int]:
        return self._groups[group_id].opened_version, group_id

    def _teaches_nothing(self, group: Group) -> bool:
        """Return whether a group is to be replaced because its rewards are all equal.

        Beyond the limit groups are taken as they are: a policy that always or never succeeds
        would otherwise wait forever.
        """
        if (
            not self._config.drop_equal_groups
            or self._equal_dropped >= self._config.groups_per_batch
        ):
            return False
        return len({total_reward(scored) for scored in group.survivors}) == 1

    def _drop(self, group: Group) -> None:
        self.counts["dropped_groups"] += 1
        del self._groups[group.group_id]

    def advance(self, newest_version: int) -> int:
        """Note that there are new weights.

        Returns:
            The credits of what they were trained on, for `give_back`.
        """
        self.newest_version = newest_version
        return self._held

    def give_back(self, credits: int) -> None:
        """Allow as many groups more, now that servers sample them with the new weights."""
        self._held -= credits

    def oldest_age_s(self, now: float) -> float:
        """Return the seconds since the oldest sample without a result was issued; 0.0 if none."""
        issued = [s.issued_at for g in self._groups.values() for s in g.slots if not s.final]
        return now - min(issued, default=now)

    def overdue(self, now: float) -> list[RolloutTask]:
        """Return the samples to issue again because they gave no final result in time."""
        return self._next_attempts(self._open(now, self._config.sample_timeout_s), now)

    def reissue_open(self, now: float) -> list[RolloutTask]:
        """Return every sample without a final result, to issue again (Redis lost its data)."""
        return self._next_attempts(self._open(now), now)

    def open_keys(self, now: float, least_age_s: float = 0.0) -> list[str]:
        """Return the attempts without a final result that were issued so long ago."""
        return [str(self._key(group, index)) for group, index in self._open(now, least_age_s)]

    def reissue_lost(self, keys: Collection[str], now: float) -> list[RolloutTask]:
        """Return those that are still open, to issue again: Redis lost them, no attempt failed."""
        lost = [one for one in self._open(now) if str(self._key(*one)) in keys]
        self.counts["lost"] += len(lost)
        return self._reissue(lost, now)

    def _open(self, now: float, least_age_s: float = 0.0) -> list[tuple[Group, int]]:
        return [
            (group, index)
            for group in self._groups.values()
            for index, slot in enumerate(group.slots)
            if not slot.final and now - slot.issued_at >= least_age_s
        ]

    def _next_attempts(self, samples: Sequence[tuple[Group, int]], now: float) -> list[RolloutTask]:
        for group, index in samples:
            group.slots[index].attempt += 1
        return self._reissue(samples, now)

    def _reissue(self, samples: Sequence[tuple[Group, int]], now: float) -> list[RolloutTask]:
        for group, index in samples:
            group.slots[index].issued_at = now
        self.counts["reissued"] += len(samples)
        return [self._task(group, index) for group, index in samples]

    def take_batch(self) -> list[Group] | None:
        """Take the oldest complete groups, sorted by id.

        Returns:
            None while there are too few, or while an older group is worth waiting for.
        """
        size = self._config.groups_per_batch
        if len(self._ready) < size or self._waits_for_the_old():
            return None
        ids, self._ready = self._ready[:size], self._ready[size:]
        self._taken.update(ids)
        self._equal_dropped = 0
        return [self._groups[group_id] for group_id in sorted(ids)]

    def _waits_for_the_old(self) -> bool:
        """Return whether a group has its last chance and rollout younger ones to work on meanwhile.

        When only the old ones are left, rollout would stand still; one that has missed its last
        chance is not waited for again.
        """
        last_chance = self.newest_version - self._config.max_staleness
        versions = [g.opened_version for g in self._groups.values() if not g.complete]
        return last_chance in versions and max(versions) > last_chance

    def mark_trained(self, groups: Sequence[Group]) -> None:
        """Note that groups of `take_batch` were trained; `give_back` allows as many more."""
        for group in groups:
            self._taken.remove(group.group_id)
            del self._groups[group.group_id]
            self._held += 1
