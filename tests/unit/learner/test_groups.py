"""The book of groups: slots filled once, credits, staleness, reissue."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.learner.groups import (
    AcceptResult,
    Group,
    GroupBuffer,
    GroupBufferConfig,
    staleness,
    total_reward,
)
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.tasks import RolloutKey, RolloutTask, SamplingParameters, Task
from agent_r1_proto.trajectory import VersionSpan
from tests.support.builders import scored, trajectory

RULES = GroupBufferConfig(
    run_id="run",
    incarnation=3,
    group_size=2,
    groups_per_batch=2,
    max_staleness=0,
    sample_timeout_s=10.0,
)


def make_book(**changes: object) -> GroupBuffer:
    return GroupBuffer(replace(RULES, **changes), SamplingParameters(temperature=0.7))  # pyright: ignore[reportArgumentType]


def open_group(book: GroupBuffer, group_id: int, now: float = 0.0) -> list[RolloutTask]:
    return book.open(group_id, Task(id=f"q{group_id}", prompt="who?"), now)


def result(rollout: RolloutTask, **changes: object) -> ScoredTrajectory:
    return scored(rollout, **changes)  # pyright: ignore[reportArgumentType]


def complete(book: GroupBuffer, group_id: int, **changes: object) -> None:
    for rollout in open_group(book, group_id):
        assert book.accept(result(rollout, **changes)) is AcceptResult.FILLED


def take(book: GroupBuffer) -> list[Group]:
    groups = book.take_batch()
    assert groups is not None
    return groups


def test_a_group_asks_for_every_sample_once():
    asked = open_group(make_book(), 7)
    assert [str(rollout.key) for rollout in asked] == ["run/3/7/0/0", "run/3/7/1/0"]
    assert {rollout.purpose for rollout in asked} == {"train"}
    assert {rollout.sampling.temperature for rollout in asked} == {0.7}


def test_a_batch_is_the_oldest_complete_groups_sorted_by_id():
    book = make_book(max_staleness=1)
    asked = {group_id: open_group(book, group_id) for group_id in range(4)}
    for group_id in (3, 1, 0, 2):
        for rollout in asked[group_id]:
            book.accept(result(rollout))
    assert [group.group_id for group in take(book)] == [0, 1]
    assert [group.group_id for group in take(book)] == [2, 3]
    assert book.take_batch() is None


def next_version(book: GroupBuffer) -> None:
    book.mark_trained(take(book))
    book.advance(book.newest_version + 1)


def answer(book: GroupBuffer, asked: list[RolloutTask], **changes: object) -> None:
    for rollout in asked:
        assert book.accept(result(rollout, **changes)) is AcceptResult.FILLED


def test_a_batch_waits_for_a_group_at_its_last_chance_while_rollout_has_younger_ones():
    book = make_book(max_staleness=1)
    slow = open_group(book, 0)
    for group_id in (1, 2, 3):
        complete(book, group_id)
    next_version(book)  # trains 1 and 2; 0 and 3 are of version 0
    complete(book, 4)
    young = open_group(book, 5)
    assert book.num_ready == 2
    assert book.take_batch() is None  # in the batch after, 0 would be 2 versions old
    answer(book, slow)
    assert [group.group_id for group in take(book)] == [0, 3]
    answer(book, young)
    assert [group.group_id for group in take(book)] == [4, 5]


def test_a_batch_goes_without_the_late_group_when_rollout_would_stand_still():
    book = make_book(max_staleness=1)
    slow = open_group(book, 0)
    for group_id in (1, 2, 3):
        complete(book, group_id)
    next_version(book)
    complete(book, 4)
    young = open_group(book, 5)
    assert book.take_batch() is None
    answer(book, young)
    next_version(book)  # 3 and 4: only the late group was left to wait for
    complete(book, 6)
    assert [group.group_id for group in take(book)] == [5, 6]  # it is not waited for again
    answer(book, slow, policy_version=0)
    complete(book, 7)
    late, _ = take(book)
    assert late.group_id == 0
    assert [staleness(s.trajectory, book.newest_version) for s in late.survivors] == [2, 2]


def test_survivors_are_in_sample_order_however_they_came():
    book = make_book(groups_per_batch=1, group_size=3)
    for rollout in reversed(open_group(book, 0)):
        book.accept(result(rollout))
    survivors = take(book)[0].survivors
    assert [s.trajectory.rollout.key.sample_index for s in survivors] == [0, 1, 2]


def test_the_first_final_result_wins_whatever_its_attempt():
    book = make_book(groups_per_batch=1)
    first, second = open_group(book, 0)
    again = next(r for r in book.overdue(10.0) if r.key.sample_index == 0)
    assert again.key.attempt == 1
    assert book.accept(result(again, total=0.25)) is AcceptResult.FILLED
    assert book.accept(result(first, total=0.75)) is AcceptResult.DUPLICATE
    book.accept(result(second))
    assert [s.reward.total for s in take(book)[0].survivors if s.reward] == [0.25, 1.0]
    assert book.counts["duplicate"] == 1


def test_a_zombie_of_a_trained_group_is_a_duplicate():
    book = make_book(groups_per_batch=1)
    first, second = open_group(book, 0)
    for rollout in (first, second):
        book.accept(result(rollout))
    book.mark_trained(take(book))
    assert book.accept(result(first)) is AcceptResult.DUPLICATE


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
    book = make_book()
    rollout = open_group(book, 0)[0]
    key = RolloutKey(**(rollout.key.model_dump() | changes))
    assert book.accept(result(rollout.replace(key=key))) is verdict
    assert book.counts == {verdict: 1}
    assert book.take_batch() is None


def test_an_evaluation_result_is_foreign():
    book = make_book()
    rollout = open_group(book, 0)[0]
    assert book.accept(result(rollout.replace(purpose="eval"))) is AcceptResult.FOREIGN


def test_a_group_trains_on_its_survivors_when_two_are_left():
    book = make_book(groups_per_batch=1, group_size=3)
    first, second, third = open_group(book, 0)
    assert book.accept(result(second, status="FAILED")) is AcceptResult.FAILED
    book.accept(result(first))
    book.accept(result(third))
    group = take(book)[0]
    assert [s.trajectory.rollout.key.sample_index for s in group.survivors] == [0, 2]
    assert len(group.failures) == 1


def test_a_group_with_one_survivor_is_dropped_and_gives_its_credit_back():
    book = make_book()
    first, second = open_group(book, 0)
    room = book.room()
    book.accept(result(first))
    book.accept(result(second, status="FAILED"))
    assert book.room() == room + 1
    assert book.outstanding_ids() == []
    assert book.counts["dropped_groups"] == 1


def test_a_group_of_one_needs_one_survivor():
    book = make_book(group_size=1, groups_per_batch=1)
    complete(book, 0)
    assert len(take(book)) == 1


def test_a_trajectory_without_a_sampled_token_counts_as_failed():
    book = make_book()
    rollout = open_group(book, 0)[0]
    record = trajectory(rollout, num_sampled=0, status="TRUNCATED", turns=[], version_spans=[])
    empty = result(rollout).replace(trajectory=record)
    assert book.accept(empty) is AcceptResult.FAILED


def test_an_unscored_trajectory_counts_as_failed():
    book = make_book()
    rollout = open_group(book, 0)[0]
    assert book.accept(result(rollout).replace(reward=None)) is AcceptResult.FAILED


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
    book = make_book(max_staleness=1)
    complete(book, 0)
    first, second = open_group(book, 1)
    book.advance(50)
    assert book.accept(result(first, policy_version=0)) is AcceptResult.FILLED
    assert book.accept(result(second, policy_version=0)) is AcceptResult.FILLED
    assert [group.group_id for group in take(book)] == [0, 1]
    assert book.counts == {"filled": 4, "retried": 0}


def test_credits_come_back_only_when_new_weights_are_published():
    book = make_book()
    complete(book, 0)
    complete(book, 1)
    assert book.room() == 0
    book.mark_trained(take(book))
    assert book.room() == 0
    with pytest.raises(ValueError, match=r"max_staleness \(0\) allows"):
        open_group(book, 2)
    book.advance(1)
    assert book.room() == 2


def test_opening_a_group_twice_is_refused():
    book = make_book()
    open_group(book, 0)
    with pytest.raises(ValueError, match="outstanding already"):
        open_group(book, 0)


def test_retiring_a_group_that_was_not_taken_is_refused():
    book = make_book(groups_per_batch=1)
    complete(book, 0)
    groups = take(book)
    book.mark_trained(groups)
    with pytest.raises(ValueError, match="was not taken"):
        book.mark_trained(groups)


def test_an_overdue_sample_is_issued_again_with_the_next_attempt():
    book = make_book()
    first, _ = open_group(book, 0, now=100.0)
    book.accept(result(first))
    assert book.overdue(109.9) == []
    again = book.overdue(110.0)
    assert [str(rollout.key) for rollout in again] == ["run/3/0/1/1"]
    assert again[0].max_attempts == 4  # three more, counted from its attempt
    assert book.overdue(110.0) == []
    assert [rollout.key.attempt for rollout in book.overdue(120.0)] == [2]


def test_everything_open_is_issued_again_when_redis_lost_its_data():
    book = make_book()
    first, _ = open_group(book, 0)
    book.accept(result(first))
    open_group(book, 1)
    keys = [(r.key.group_id, r.key.sample_index, r.key.attempt) for r in book.reissue_open(1.0)]
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
    book = make_book(
        group_size=group_size, groups_per_batch=groups_per_batch, max_staleness=max_staleness
    )
    services = Services(rng)
    opened, trained, version, now = 0, list[tuple[int, int]](), 0, 0.0
    for _ in range(120):
        now += rng.random() * 4
        while book.room() > 0:
            services.queue += open_group(book, opened, now)
            opened += 1
        assert len(book) <= book.rules.max_outstanding
        services.queue += book.overdue(now)
        answer = services.next_result(version)
        if answer is not None:
            book.accept(answer)
        groups = book.take_batch()
        if groups is None:
            continue
        assert len(groups) == groups_per_batch
        for group in groups:
            assert len(group.survivors) >= book.rules.min_survivors
            for survivor in group.survivors:
                key = survivor.trajectory.rollout.key
                trained.append((key.group_id, key.sample_index))
        book.mark_trained(groups)
        version += 1
        book.advance(version)
    assert len(trained) == len(set(trained))
    # Nothing is lost: every group was trained, dropped or is outstanding.
    trained_groups = {group_id for group_id, _ in trained}
    assert opened == len(trained_groups) + book.counts["dropped_groups"] + len(book)


def test_the_greedy_answer_is_asked_for_at_temperature_0_and_compared_with():
    book = make_book(greedy_baseline=True)
    asked = open_group(book, 0)
    assert [rollout.sampling.temperature for rollout in asked] == [0.7, 0.7, 0.0]
    assert {rollout.group_size for rollout in asked} == {3}
    for rollout, total in zip(asked, (1.0, 0.0, 0.5), strict=True):
        assert book.accept(result(rollout, total=total)) is AcceptResult.FILLED
    complete(make := make_book(greedy_baseline=True, groups_per_batch=1), 1)
    (group,) = take(make)
    assert total_reward(group.greedy_answer()) == 1.0
    assert len(group.survivors) == 2


def test_a_group_without_its_greedy_answer_is_dropped():
    book = make_book(greedy_baseline=True)
    *samples, greedy = open_group(book, 0)
    for rollout in samples:
        book.accept(result(rollout))
    assert book.accept(result(greedy, status="FAILED")) is AcceptResult.FAILED
    assert book.counts["dropped_groups"] == 1
    assert len(book) == 0


def test_groups_with_equal_rewards_are_replaced_up_to_a_batch_of_them():
    book = make_book(drop_equal_groups=True, max_staleness=9)
    for group_id in range(2):  # groups_per_batch is 2
        complete(book, group_id)
    assert (book.counts["equal_groups"], book.num_ready, len(book)) == (2, 0, 0)
    complete(book, 2)  # beyond the limit they are taken as they are
    assert (book.counts["equal_groups"], book.num_ready) == (2, 1)
    for rollout, total in zip(open_group(book, 3), (0.0, 1.0), strict=True):
        book.accept(result(rollout, total=total))
    assert [group.group_id for group in take(book)] == [2, 3]
    complete(book, 4)  # the limit is one of each batch
    assert (book.counts["equal_groups"], book.num_ready) == (3, 0)


def test_a_sample_that_nobody_will_answer_fails_like_any_other():
    book = make_book()
    first, second = open_group(book, 0)
    lost = book.failed_result(RolloutKey.parse(str(first.key)), "unreadable_entry: tasks")
    assert lost is not None
    assert book.accept(lost) is AcceptResult.FAILED
    assert book.failed_result(first.key, "again") is None  # it is final
    book.accept(result(second))
    others: list[dict[str, Any]] = [
        {"incarnation": 2},
        {"run_id": "other"},
        {"sample_index": 2},
        {"group_id": 9},
    ]
    for changes in others:
        key = RolloutKey(**(second.key.model_dump() | changes))
        assert book.failed_result(key, "not asked for") is None
