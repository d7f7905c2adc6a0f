"""Trajectories of several segments: cut for the model, counted whole by the loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from agent_r1.learner.algorithms.aggregation import Aggregation
from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.learner.engine.layout import SegmentBatch, loss_mask
from agent_r1.learner.engine.microbatches import plan_batch
from agent_r1.learner.engine.ranks.messages import MicroBatch, RankBatch
from agent_r1.learner.engine.schedule import LearningRates

# One segment: prompt 10 11, sampled 12 13.
PLAIN = TrainSample(
    token_ids=np.array([10, 11, 12, 13], np.int32),
    loss_mask=np.array([0, 0, 1, 1], bool),
    rollout_logprobs=np.array([0, 0, -1, -2], np.float32),
    advantages=np.array([0, 0, 1, 1], np.float32),
    name="plain",
)
# Two: prompt 10 11, sampled 14; then history 10 15, sampled 16 17.
CUT = TrainSample(
    token_ids=np.array([10, 11, 14, 10, 15, 16, 17], np.int32),
    loss_mask=np.array([0, 0, 1, 0, 0, 1, 1], bool),
    rollout_logprobs=np.array([0, 0, -3, 0, 0, -4, -5], np.float32),
    advantages=np.array([0, 0, 2, 0, 0, 2, 2], np.float32),
    name="cut",
    segment_starts=[3],
)


def test_segments_are_sequences_of_their_own():
    batch = SegmentBatch([PLAIN, CUT])
    assert [s.token_ids.tolist() for s in batch.segments] == [
        [10, 11, 12, 13],
        [10, 11, 14],
        [10, 15, 16, 17],
    ]
    assert [s.rollout_logprobs.tolist() for s in batch.segments][1:] == [[0, 0, -3], [0, 0, -4, -5]]
    assert [s.name for s in batch.segments] == ["plain", "cut", "cut"]
    assert batch.owners == [0, 1, 1]
    assert batch.of(1, loss_mask) == [1, 2]
    values = [PLAIN.advantages, CUT.advantages]
    assert [row.tolist() for row in batch.join(batch.cut(values))] == [v.tolist() for v in values]


def plan(policy_loss: str, aggregation: Aggregation, max_tokens: int) -> list[MicroBatch]:
    order = order_of([PLAIN, CUT], policy_loss, aggregation, max_tokens_per_microbatch=max_tokens)
    return order.steps[0].microbatches


def order_of(
    samples: list[TrainSample],
    policy_loss: str,
    aggregation: Aggregation = "token_mean",
    **settings: Any,
) -> RankBatch:
    spec = LossSpec(policy_loss=policy_loss, aggregation=aggregation)
    table = EngineConfig(lr=1.0, **settings)
    rates = LearningRates(table, None, critic_lr=1.0)
    (order,) = plan_batch(samples, spec, table, rates, 0)
    return order


def trajectory(*segments: list[int], trained: int = 1) -> TrainSample:
    """A trajectory of segments whose last tokens are trained."""
    mask = [t >= len(ids) - trained for ids in segments for t in range(len(ids))]
    starts = np.cumsum([len(ids) for ids in segments])[:-1].tolist()
    ones = np.where(mask, 1, 0).astype(np.float32)
    token_ids = np.concatenate([np.array(ids, np.int32) for ids in segments])
    return TrainSample(token_ids, np.array(mask), -ones, ones, segment_starts=starts)


@pytest.mark.parametrize("policy_loss", ["ppo", "gspo"])
def test_segments_that_begin_alike_share_it_whoever_stands_between_them(policy_loss: str):
    # Another agent's segment stands between two of the main one; both trajectories begin alike.
    main, other = [5, 6, 7, 8], [1, 2, 3]
    samples = [trajectory([*main, last], [*other, last], [*main, last, 4]) for last in (20, 21)]
    (batch,) = order_of(samples, policy_loss, share_prefixes=True).steps[0].microbatches
    # by hand: the main agent's 4 tokens and the other's 3 once, and for each trajectory its last
    # tokens: one of each agent, and the 4 behind
    assert (batch.num_tokens, batch.num_computed) == (2 * (5 + 4 + 6), 4 + 3 + 2 * 3)
    owners = {one: {*batch.sequences[batch.targets[batch.predictions] == one]} for one in (20, 21)}
    assert owners[20].isdisjoint(owners[21])


@pytest.mark.parametrize("policy_loss", ["ppo", "gspo"])
def test_microbatches_are_as_large_as_what_they_compute(policy_loss: str):
    # Four trajectories of 3 segments of 6 tokens: 5 tokens that all have, and one of each segment.
    samples = [trajectory(*([1, 2, 3, 4, 5, 6 + 3 * i + k] for k in range(3))) for i in range(4)]
    found = order_of(samples, policy_loss, share_prefixes=True, max_tokens_per_microbatch=17)
    assert [batch.num_computed for batch in found.steps[0].microbatches] == [5 + 12]


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_segments_without_a_token_that_counts_are_not_computed(share_prefixes: bool):
    excluded = trajectory([1, 2, 3], [4, 5, 6, 7])
    learned = np.array([0, 1, 0, 0, 0, 0, 0], bool)  # the critic learns where the policy does not
    excluded = dataclasses.replace(
        excluded,
        loss_mask=np.array([0, 0, 0, 0, 0, 0, 1], bool),
        value_mask=learned,
        returns=learned.astype(np.float32),
        old_values=learned.astype(np.float32),
    )
    (step,) = order_of([excluded], "gspo", share_prefixes=share_prefixes).steps
    assert [batch.indices for batch in step.microbatches] == [(1,)]
    assert [batch.num_tokens for batch in step.microbatches] == [4]
    assert [batch.indices for batch in step.value_batches] == [(0,)]


@pytest.mark.parametrize(
    ("aggregation", "plain", "cut"),
    [
        # by hand: 5 trained tokens, 2 and 3 of them; two trajectories, and not three
        ("token_mean", 1 / 5, 1 / 5),
        ("sequence_mean", 1 / (2 * 2), 1 / (2 * 3)),
        ("sequence_sum", 1 / 2, 1 / 2),
    ],
)
@pytest.mark.parametrize("max_tokens", [4, 1000])
def test_the_loss_counts_trajectories(
    aggregation: Aggregation, plain: float, cut: float, max_tokens: int
):
    weights: dict[int, float] = {}
    for batch in plan("ppo", aggregation, max_tokens):
        targets = batch.targets[batch.predictions]
        weights |= dict(zip(targets.tolist(), batch.weights.tolist(), strict=True))
    assert weights == pytest.approx({12: plain, 13: plain, 14: cut, 16: cut, 17: cut})


def test_segments_go_to_several_microbatches_where_tokens_are_judged_alone():
    # Three sequences of 4, 3 and 4 tokens, of which one fits.
    held = [batch.indices for batch in plan("ppo", "token_mean", 4)]
    assert sorted(i for indices in held for i in indices) == [0, 1, 2]
    assert len(held) > 1
    assert (1, 2) not in held


@pytest.mark.parametrize("max_tokens", [4, 1000])
def test_a_loss_of_whole_trajectories_gets_whole_trajectories(max_tokens: int):
    found: dict[int, tuple[int, int]] = {}
    for number, batch in enumerate(plan("gspo", "sequence_mean", max_tokens)):
        targets = batch.targets[batch.predictions].tolist()
        rows = batch.sequences.tolist()
        found |= {t: (number, row) for t, row in zip(targets, rows, strict=True)}
    assert found[14] == found[16] == found[17] != found[12]
