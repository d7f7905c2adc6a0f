"""The buffer of groups: slots filled once, credits, staleness, reissue."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.groups import (
    AcceptResult,
    Group,
    GroupBuffer,
    staleness,
    total_reward,
)
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.tasks import RolloutKey, RolloutTask, Task
from agent_r1_proto.trajectory import VersionSpan
from tests.support.builders import scored, trajectory

CONFIG = {
    "group_size": 2,
    "groups_per_batch": 2,
    "sample_timeout_s": 10.0,
    "temperature": 0.7,
}


def make_buffer(**changes: object) -> GroupBuffer:
    config = LearnerConfig.model_validate({**CONFIG, **changes})
    return GroupBuffer(config, run_id="run", incarnation=3)


def open_group(buffer: GroupBuffer, group_id: int, now: float = 0.0) -> list[RolloutTask]:
    return buffer.open(group_id, Task(id=f"q{group_id}", prompt="who?"), now)


def result(rollout: RolloutTask, **changes: object) -> ScoredTrajectory:
    return scored(rollout, **changes)  # pyright: ignore[reportArgumentType]


def complete(buffer: GroupBuffer, group_id: int, **changes: object) -> None:
    for rollout in open_group(buffer, group_id):
        assert buffer.accept(result(rollout, **changes)) is AcceptResult.FILLED


def take(buffer: GroupBuffer) -> list[Group]:
    groups = buffer.take_batch()
    assert groups is not None
    return groups


def test_a_group_asks_for_every_sample_once():
    asked = open_group(make_buffer(), 7)
    assert [str(rollout.key) for rollout in asked] == ["run/3/7/0/0", "run/3/7/1/0"]
    assert {rollout.purpose for rollout in asked} == {"train"}
    assert {rollout.sampling.temperature for rollout in asked} == {0.7}


def test_a_batch_is_the_oldest_complete_groups_sorted_by_id():
    buffer = make_buffer(max_staleness=1)
    asked = {group_id: open_group(buffer, group_id) for group_id in range(4)}
    for group_id in (3, 1, 0, 2):
        for rollout in asked[group_id]:
            buffer.accept(result(rollout))
    assert [group.group_id for group in take(buffer)] == [0, 1]
    assert [group.group_id for group in take(buffer)] == [2, 3]
    assert buffer.take_batch() is None


def next_version(buffer: GroupBuffer) -> None:
    buffer.mark_trained(take(buffer))
    buffer.give_back(buffer.advance(buffer.newest_version + 1))


def answer(buffer: GroupBuffer, asked: list[RolloutTask], **changes: object) -> None:
    for rollout in asked:
        assert buffer.accept(result(rollout, **changes)) is AcceptResult.FILLED


def test_a_batch_waits_for_a_group_at_its_last_chance_while_rollout_has_younger_ones():
    buffer = make_buffer(max_staleness=1)
    slow = open_group(buffer, 0)
    for group_id in (1, 2, 3):
        complete(buffer, group_id)
    next_version(buffer)  # trains 1 and 2; 0 and 3 are of version 0
    complete(buffer, 4)
    young = open_group(buffer, 5)
    assert buffer.num_ready == 2
    assert buffer.take_batch() is None  # in the batch after, 0 would be 2 versions old
    answer(buffer, slow)
    assert [group.group_id for group in take(buffer)] == [0, 3]
    answer(buffer, young)
    assert [group.group_id for group in take(buffer)] == [4, 5]


def test_a_batch_goes_without_the_late_group_when_rollout_would_stand_still():
    buffer = make_buffer(max_staleness=1)
    slow = open_group(buffer, 0)
    for group_id in (1, 2, 3):
        complete(buffer, group_id)
    next_version(buffer)
    complete(buffer, 4)
    young = open_group(buffer, 5)
    assert buffer.take_batch() is None
    answer(buffer, young)
    next_version(buffer)  # 3 and 4: only the late group was left to wait for
    complete(buffer, 6)
    assert [group.group_id for group in take(buffer)] == [5, 6]  # it is not waited for again
    answer(buffer, slow, policy_version=0)
    complete(buffer, 7)
    late, _ = take(buffer)
    assert late.group_id == 0
    assert [staleness(s.trajectory, buffer.newest_version) for s in late.survivors] == [2, 2]


def test_survivors_are_in_sample_order_however_they_came():
    buffer = make_buffer(groups_per_batch=1, group_size=3)
    for rollout in reversed(open_group(buffer, 0)):
        buffer.accept(result(rollout))
    survivors = take(buffer)[0].survivors
    assert [s.trajectory.rollout.key.sample_index for s in survivors] == [0, 1, 2]


def test_the_first_final_result_wins_whatever_its_attempt():
    buffer = make_buffer(groups_per_batch=1)
    first, second = open_group(buffer, 0)
    again = next(r for r in buffer.overdue(10.0) if r.key.sample_index == 0)
    assert again.key.attempt == 1
    assert buffer.accept(result(again, total=0.25)) is AcceptResult.FILLED
    assert buffer.accept(result(first, total=0.75)) is AcceptResult.DUPLICATE
    buffer.accept(result(second))
    assert [s.reward.total for s in take(buffer)[0].survivors if s.reward] == [0.25, 1.0]
    assert buffer.counts["duplicate"] == 1


def test_a_zombie_of_a_trained_group_is_a_duplicate():
    buffer = make_buffer(groups_per_batch=1)
    first, second = open_group(buffer, 0)
    for rollout in (first, second):
        buffer.accept(result(rollout))
    buffer.mark_trained(take(buffer))
    assert buffer.accept(result(first)) is AcceptResult.DUPLICATE


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"incarnation": 2}, AcceptResult.OLD_INCARNATION),
        ({"incarnation": 4}, AcceptResult.OLD_INCARNATION),
        ({"run_id": "other"}, AcceptResult.FOREIGN),
        ({"sample_index": 2}, AcceptResult.FOREIGN),
        ({"group_id": 9}, AcceptResult.DUPLICATE),
    ],
)
def test_a_result_that_was_not_asked_for_is_dropped(changes: dict[str, Any], verdict: AcceptResult):
    buffer = make_buffer()
    rollout = open_group(buffer, 0)[0]
    key = RolloutKey(**(rollout.key.model_dump() | changes))
    assert buffer.accept(result(rollout.replace(key=key))) is verdict
    assert buffer.counts == {verdict: 1}
    assert buffer.take_batch() is None


def test_an_evaluation_result_is_foreign():
    buffer = make_buffer()
    rollout = open_group(buffer, 0)[0]
    assert buffer.accept(result(rollout.replace(purpose="eval"))) is AcceptResult.FOREIGN


def test_a_group_trains_on_its_survivors_when_two_are_left():
    buffer = make_buffer(groups_per_batch=1, group_size=3)
    first, second, third = open_group(buffer, 0)
    assert buffer.accept(result(second, status="FAILED")) is AcceptResult.FAILED
    buffer.accept(result(first))
    buffer.accept(result(third))
    group = take(buffer)[0]
    assert [s.trajectory.rollout.key.sample_index for s in group.survivors] == [0, 2]
    assert len(group.failures) == 1


def test_a_group_with_one_survivor_is_dropped_and_gives_its_credit_back():
    buffer = make_buffer()
    first, second = open_group(buffer, 0)
    room = buffer.room()
    buffer.accept(result(first))
    buffer.accept(result(second, status="FAILED"))
    assert buffer.room() == room + 1
    assert buffer.outstanding_ids() == []
    assert buffer.counts["dropped_groups"] == 1


def test_a_group_of_one_needs_one_survivor():
    buffer = make_buffer(group_size=1, groups_per_batch=1, algorithm="reinforce_pp")
    complete(buffer, 0)
    assert len(take(buffer)) == 1


def test_a_trajectory_without_a_sampled_token_counts_as_failed():
    buffer = make_buffer()
    rollout = open_group(buffer, 0)[0]
    record = trajectory(rollout, num_sampled=0, status="TRUNCATED", turns=[], version_spans=[])
    empty = result(rollout).replace(trajectory=record)
    assert buffer.accept(empty) is AcceptResult.FAILED


def test_an_unscored_trajectory_counts_as_failed():
    buffer = make_buffer()
    rollout = open_group(buffer, 0)[0]
    assert buffer.accept(result(rollout).replace(reward=None)) is AcceptResult.FAILED


def test_staleness_is_newest_minus_lowest_version_of_the_sampled_tokens():
    record = trajectory(
        num_sampled=3,
        version_spans=[
            VersionSpan(policy_version=1, start=0, end=2),  # prompt only
            VersionSpan(policy_version=4, start=2, end=3),
            VersionSpan(policy_version=5, start=3, end=5),
        ],
    )
    assert staleness(record, 6) == 2
    assert staleness(record, 4) == 0
    assert staleness(trajectory(num_sampled=0, turns=[]), 9) == 0


def test_age_discards_nothing():
    buffer = make_buffer(max_staleness=1)
    complete(buffer, 0)
    first, second = open_group(buffer, 1)
    buffer.give_back(buffer.advance(50))
    assert buffer.accept(result(first, policy_version=0)) is AcceptResult.FILLED
    assert buffer.accept(result(second, policy_version=0)) is AcceptResult.FILLED
    assert [group.group_id for group in take(buffer)] == [0, 1]
    assert buffer.counts == {"filled": 4, "retried": 0}


def test_credits_come_back_only_when_new_weights_are_published():
    buffer = make_buffer()
    complete(buffer, 0)
    complete(buffer, 1)
    assert buffer.room() == 0
    buffer.mark_trained(take(buffer))
    assert buffer.room() == 0
    credits = buffer.advance(1)
    assert buffer.room() == 0
    buffer.give_back(credits)
    assert buffer.room() == 2


def test_what_was_trained_while_weights_were_written_waits_for_its_own():
    buffer = make_buffer(max_staleness=1)
    for group_id in range(4):
        complete(buffer, group_id)
    buffer.mark_trained(take(buffer))
    credits = buffer.advance(1)
    buffer.mark_trained(take(buffer))
    buffer.give_back(credits)
    assert buffer.room() == 2


def test_an_overdue_sample_is_issued_again_with_the_next_attempt():
    buffer = make_buffer()
    first, _ = open_group(buffer, 0, now=100.0)
    buffer.accept(result(first))
    assert buffer.overdue(109.9) == []
    again = buffer.overdue(110.0)
    assert [str(rollout.key) for rollout in again] == ["run/3/0/1/1"]
    assert again[0].max_attempts == 4  # three more, counted from its attempt
    assert buffer.overdue(110.0) == []
    assert [rollout.key.attempt for rollout in buffer.overdue(120.0)] == [2]


def test_everything_open_is_issued_again_when_redis_lost_its_data():
    buffer = make_buffer()
    first, _ = open_group(buffer, 0)
    buffer.accept(result(first))
    open_group(buffer, 1)
    keys = [(r.key.group_id, r.key.sample_index, r.key.attempt) for r in buffer.reissue_open(1.0)]
    assert keys == [(0, 1, 1), (1, 0, 1), (1, 1, 1)]


class Services:
    """Answers samples in any order, with failures, duplicates and old weights."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.queue: list[RolloutTask] = []
        self.answered: list[ScoredTrajectory] = []

    def next_result(self, version: int) -> ScoredTrajectory | None:
        if self.answered and self.rng.random() < 0.2:
            return self.rng.choice(self.answered)
        if not self.queue:
            return None
        rollout = self.queue.pop(self.rng.randrange(len(self.queue)))
        status = "FAILED" if self.rng.random() < 0.2 else "COMPLETED"
        old = max(0, version - self.rng.choice([0, 0, 0, 1, 2]))
        answer = result(rollout, status=status, policy_version=old)
        self.answered.append(answer)
        return answer


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    group_size=st.integers(1, 4),
    groups_per_batch=st.integers(1, 3),
    max_staleness=st.integers(0, 2),
)
def test_whatever_happens_each_sample_is_trained_at_most_once(
    seed: int, group_size: int, groups_per_batch: int, max_staleness: int
):
    rng = random.Random(seed)
    buffer = make_buffer(
        algorithm="reinforce_pp",
        group_size=group_size,
        groups_per_batch=groups_per_batch,
        max_staleness=max_staleness,
    )
    services = Services(rng)
    opened, trained, version, now = 0, list[tuple[int, int]](), 0, 0.0
    for _ in range(120):
        now += rng.random() * 4
        while buffer.room() > 0:
            services.queue += open_group(buffer, opened, now)
            opened += 1
        assert len(buffer) <= (max_staleness + 1) * groups_per_batch
        services.queue += buffer.overdue(now)
        answer = services.next_result(version)
        if answer is not None:
            buffer.accept(answer)
        groups = buffer.take_batch()
        if groups is None:
            continue
        assert len(groups) == groups_per_batch
        for group in groups:
            assert len(group.survivors) >= min(2, group_size)
            for survivor in group.survivors:
                key = survivor.trajectory.rollout.key
                trained.append((key.group_id, key.sample_index))
        buffer.mark_trained(groups)
        version += 1
        buffer.give_back(buffer.advance(version))
    assert len(trained) == len(set(trained))
    # Nothing is lost: every group was trained, dropped or is outstanding.
    trained_groups = {group_id for group_id, _ in trained}
    assert opened == len(trained_groups) + buffer.counts["dropped_groups"] + len(buffer)


def test_the_greedy_answer_is_asked_for_at_temperature_0_and_compared_with():
    buffer = make_buffer(algorithm="remax")
    asked = open_group(buffer, 0)
    assert [rollout.sampling.temperature for rollout in asked] == [0.7, 0.7, 0.0]
    assert {rollout.group_size for rollout in asked} == {3}
    for rollout, total in zip(asked, (1.0, 0.0, 0.5), strict=True):
        assert buffer.accept(result(rollout, total=total)) is AcceptResult.FILLED
    complete(make := make_buffer(algorithm="remax", groups_per_batch=1), 1)
    (group,) = take(make)
    assert group.greedy is not None
    assert total_reward(group.greedy) == 1.0
    assert len(group.survivors) == 2


def test_a_group_without_its_greedy_answer_is_dropped():
    buffer = make_buffer(algorithm="remax")
    *samples, greedy = open_group(buffer, 0)
    for rollout in samples:
        buffer.accept(result(rollout))
    assert buffer.accept(result(greedy, status="FAILED")) is AcceptResult.FAILED
    assert buffer.counts["dropped_groups"] == 1
    assert len(buffer) == 0


def test_groups_with_equal_rewards_are_replaced_up_to_a_batch_of_them():
    buffer = make_buffer(drop_equal_groups=True, max_staleness=9)
    for group_id in range(2):  # groups_per_batch is 2
        complete(buffer, group_id)
    assert (buffer.counts["equal_groups"], buffer.num_ready, len(buffer)) == (2, 0, 0)
    complete(buffer, 2)  # beyond the limit they are taken as they are
    assert (buffer.counts["equal_groups"], buffer.num_ready) == (2, 1)
    for rollout, total in zip(open_group(buffer, 3), (0.0, 1.0), strict=True):
        buffer.accept(result(rollout, total=total))
    assert [group.group_id for group in take(buffer)] == [2, 3]
    complete(buffer, 4)  # the limit is one of each batch
    assert (buffer.counts["equal_groups"], buffer.num_ready) == (3, 0)


def test_a_sample_that_nobody_will_answer_fails_like_any_other():
    buffer = make_buffer()
    first, second = open_group(buffer, 0)
    lost = buffer.failed_result(RolloutKey.parse(str(first.key)), "unreadable_entry: tasks")
    assert lost is not None
    assert buffer.accept(lost) is AcceptResult.FAILED
    assert buffer.failed_result(first.key, "again") is None  # it is final
    buffer.accept(result(second))
    others: list[dict[str, Any]] = [
        {"incarnation": 2},
        {"run_id": "other"},
        {"sample_index": 2},
        {"group_id": 9},
    ]
    for changes in others:
        key = RolloutKey(**(second.key.model_dump() | changes))
        assert buffer.failed_result(key, "not asked for") is None
