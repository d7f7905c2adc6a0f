"""Trajectories of several segments: cut for the model, counted whole by the loss."""

from __future__ import annotations

import numpy as np
import pytest

from agent_r1.learner.algorithms.aggregation import Aggregation
from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.learner.engine.layout import SegmentBatch
from agent_r1.learner.engine.microbatches import plan_batch
from agent_r1.learner.engine.ranks.messages import MicroBatch
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
    assert batch.of([1]) == [1, 2]
    values = [PLAIN.advantages, CUT.advantages]
    assert [row.tolist() for row in batch.join(batch.cut(values))] == [v.tolist() for v in values]


def plan(policy_loss: str, aggregation: Aggregation, max_tokens: int) -> list[MicroBatch]:
    spec = LossSpec(policy_loss=policy_loss, aggregation=aggregation)
    table = EngineConfig(lr=1.0, max_tokens_per_microbatch=max_tokens)
    (order,) = plan_batch([PLAIN, CUT], spec, table, LearningRates(table, None), 0)
    (step,) = order.steps
    return step.microbatches


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
