"""Training beside rollout, with a clock that is simulated: who is trained, when, how fast.

The latencies have a heavy tail, as tools have: 0.5 s plus 0.3 s x Pareto(1.2), whose mean is
0.3 x 1.2 / 0.2 = 1.8 s and whose variance is infinite.
"""

from __future__ import annotations

import heapq
import random
import statistics
from dataclasses import dataclass, field

import pytest

from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.groups import GroupBuffer, staleness
from agent_r1_proto.tasks import RolloutTask, Task
from tests.support.builders import scored

GROUPS_PER_BATCH = 8
GROUP_SIZE = 4
STEPS = 60
TRAIN_S = 1.0


@dataclass
class Simulation:
    """One run; every sample starts when it is asked for and takes its time."""

    max_staleness: int
    seed: int = 0
    now: float = 0.0
    opened: int = 0
    asked_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """Latency of every sample that was asked for, by (group, sample)."""
    trained: list[tuple[int, int]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    passed_over: dict[int, int] = field(default_factory=dict)
    """Batches taken while a group was complete and waited, by group."""

    def __post_init__(self) -> None:
        config = LearnerConfig(
            group_size=GROUP_SIZE,
            groups_per_batch=GROUPS_PER_BATCH,
            max_staleness=self.max_staleness,
            sample_timeout_s=1e9,
        )
        self.buffer = GroupBuffer(config, run_id="run", incarnation=1)
        self.rng = random.Random(self.seed)
        self.under_way: list[tuple[float, int, int, RolloutTask]] = []
        self.complete_s: dict[int, float] = {}

    def run(self) -> Simulation:
        """Train every group of the run."""
        self.fill()
        for _ in range(STEPS):
            groups = self.buffer.take_batch()
            while groups is None:
                self.arrive()
                groups = self.buffer.take_batch()
            taken = {group.group_id for group in groups}
            for group_id in self.complete_s.keys() - taken:
                self.passed_over[group_id] = self.passed_over.get(group_id, 0) + 1
            for group in groups:
                self.complete_s.pop(group.group_id)
                for survivor in group.survivors:
                    key = survivor.trajectory.rollout.key
                    self.trained.append((key.group_id, key.sample_index))
                    self.ages.append(staleness(survivor.trajectory, self.buffer.newest_version))
            ends = self.now + TRAIN_S
            while self.under_way and self.under_way[0][0] <= ends:
                self.arrive()
            self.now = ends
            self.buffer.mark_trained(groups)
            self.buffer.give_back(self.buffer.advance(self.buffer.newest_version + 1))
            self.fill()
        return self

    def fill(self) -> None:
        """Ask for as many groups as there are credits."""
        while self.buffer.room() > 0 and self.opened < STEPS * GROUPS_PER_BATCH:
            task = Task(id=f"q{self.opened}", prompt="who?")
            for rollout in self.buffer.open(self.opened, task, self.now):
                key = (rollout.key.group_id, rollout.key.sample_index)
                self.asked_s[key] = 0.5 + 0.3 * self.rng.paretovariate(1.2)
                ends = self.now + self.asked_s[key]
                event = (ends, *key, rollout.replace(max_attempts=self.buffer.newest_version + 1))
                heapq.heappush(self.under_way, event)
            self.opened += 1

    def arrive(self) -> None:
        """Let the next sample end."""
        ends, group_id, _, rollout = heapq.heappop(self.under_way)
        self.now = max(self.now, ends)
        # Sampled under the weights of its start, which `fill` noted in the task.
        self.buffer.accept(scored(rollout, policy_version=rollout.max_attempts - 1))
        if all(group != group_id for _, group, _, _ in self.under_way):
            self.complete_s[group_id] = self.now


@pytest.fixture(scope="module")
def synchronous() -> Simulation:
    return Simulation(max_staleness=0).run()


@pytest.fixture(scope="module", params=[1, 2, 4])
def asynchronous(request: pytest.FixtureRequest) -> Simulation:
    return Simulation(max_staleness=request.param).run()


def test_every_sample_that_was_asked_for_is_trained_exactly_once(asynchronous: Simulation):
    # So the latencies of what is trained are those of what was asked, slow ones included.
    assert sorted(asynchronous.trained) == sorted(asynchronous.asked_s)
    assert asynchronous.buffer.counts["dropped_groups"] == 0
    slowest = max(asynchronous.asked_s, key=asynchronous.asked_s.__getitem__)
    assert asynchronous.asked_s[slowest] > 30  # the tail is there
    assert slowest in asynchronous.trained


def test_a_complete_group_is_not_passed_over_for_younger_ones(asynchronous: Simulation):
    # At most (max_staleness + 1) batches of groups are outstanding, itself among them: those that
    # are older fill no more than max_staleness batches.
    assert max(asynchronous.passed_over.values()) <= asynchronous.max_staleness


def test_few_are_late_and_the_rest_keeps_the_limit(asynchronous: Simulation):
    late = [age > asynchronous.max_staleness for age in asynchronous.ages]
    assert statistics.fmean(late) < 0.08


def test_slow_trajectories_do_not_hold_up_training(
    asynchronous: Simulation, synchronous: Simulation
):
    assert synchronous.now > 1.8 * asynchronous.now


def test_synchronous_training_is_on_policy(synchronous: Simulation):
    assert set(synchronous.ages) == {0}
    assert sorted(synchronous.trained) == sorted(synchronous.asked_s)
