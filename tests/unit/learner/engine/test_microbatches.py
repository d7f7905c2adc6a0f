"""Micro-batches: every sample once, little padding, equal counts, right positions."""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learner.config import Layout
from agent_r1.learner.engine.interface import TrainSample
from agent_r1.learner.engine.layout import build_microbatch
from agent_r1.learner.engine.microbatches import (
    plan_microbatches,
    plan_shared,
    scatter_back,
    scoring_sample,
    split_evenly,
)
from tests.support.tiny_models import make_samples

LENGTHS = st.lists(st.integers(2, 400), min_size=0, max_size=60)


@given(LENGTHS, st.integers(1, 4), st.integers(100, 2000), st.floats(0.0, 0.5))
def test_a_plan_holds_every_sample_once_within_its_limits(
    lengths: list[int], ranks: int, max_tokens: int, max_padding: float
):
    plan = plan_microbatches(lengths, ranks, max_tokens, max_padding)
    assert len(plan) == ranks
    assert len({len(share) for share in plan}) == 1
    flat = [i for share in plan for batch in share for i in batch]
    assert sorted(flat) == list(range(len(lengths)))
    for batch in (batch for share in plan for batch in share if batch):
        padded = max(lengths[i] for i in batch) * len(batch)
        real = sum(lengths[i] for i in batch)
        assert len(batch) == 1 or padded <= max_tokens
        assert padded - real <= max_padding * padded + 1e-9


@given(LENGTHS, st.integers(1, 4), st.integers(100, 2000))
def test_a_packed_plan_is_bounded_by_tokens_alone(lengths: list[int], ranks: int, max_tokens: int):
    plan = plan_microbatches(lengths, ranks, max_tokens, 0.0, packed=True)
    assert len({len(share) for share in plan}) == 1
    assert sorted(i for share in plan for batch in share for i in batch) == [*range(len(lengths))]
    sums = [[sum(lengths[i] for i in batch) for batch in share if batch] for share in plan]
    for share, rank_sums in zip(plan, sums, strict=True):
        for batch, following, tokens in zip(share, share[1:], rank_sums, strict=False):
            assert len(batch) == 1 or tokens <= max_tokens
            assert not following or tokens + lengths[following[0]] > max_tokens


@given(LENGTHS, st.integers(2, 4))
def test_ranks_differ_by_at_most_one_sample_of_tokens(lengths: list[int], ranks: int):
    plan = plan_microbatches(lengths, ranks, 1000, 0.1)
    loads = [sum(lengths[i] for batch in share for i in batch) for share in plan]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_a_sample_longer_than_the_limit_is_a_microbatch_of_its_own():
    assert plan_microbatches([10, 500, 10], 1, 100, 0.5) == [[[1], [0, 2]]]


def test_ranks_without_work_get_empty_microbatches():
    assert plan_microbatches([5], 3, 100, 0.1) == [[[0]], [[]], [[]]]


def sample(token_ids: list[int], trained: list[int]) -> TrainSample:
    """A trajectory whose values are its token ids, so that a gather can be read off."""
    ids = np.array(token_ids, np.int32)
    mask = np.isin(np.arange(len(ids)), trained)
    values = np.where(mask, ids, 0).astype(np.float32)
    return TrainSample(ids, mask, -values, np.float32(0.1) * values, temperature=0.5)


def test_positions_point_at_the_token_before_the_trained_one():
    batch = build_microbatch(
        [sample([10, 11, 12], [2]), sample([20, 21], [1])], [0, 1], layout="padded"
    )
    assert batch.token_ids.tolist() == [[10, 11, 12], [20, 21, 0]]
    # token 12 is predicted at row 0, column 1; token 21 at row 1, column 0
    assert batch.positions.tolist() == [1, 3]
    assert batch.position_ids is None
    assert batch.sequences.tolist() == [0, 1]
    assert batch.targets.tolist() == [12, 21]
    assert batch.old_logprobs.tolist() == [-12.0, -21.0]
    assert batch.advantages.tolist() == pytest.approx([1.2, 2.1])
    assert batch.temperatures.tolist() == [0.5, 0.5]
    assert (batch.num_tokens, batch.num_padded) == (5, 6)


def test_packed_samples_stand_end_to_end():
    samples = [sample([10, 11, 12], [2]), sample([20, 21], [1])]
    batch = build_microbatch(samples, [1, 0], layout="packed")
    assert batch.token_ids.tolist() == [[20, 21, 10, 11, 12]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2]]
    assert batch.paths is not None
    assert batch.spans is not None
    assert batch.paths.tolist() == [0, 1, 2, 3, 4]
    assert batch.spans.tolist() == [[0, 2], [0, 3]]
    # token 21 is predicted at place 0, token 12 at place 3
    assert batch.positions.tolist() == [0, 3]
    assert batch.targets.tolist() == [21, 12]
    assert batch.sequences.tolist() == [0, 1]
    assert batch.advantages.tolist() == pytest.approx([2.1, 1.2])
    assert (batch.num_tokens, batch.num_padded) == (5, 5)


def test_a_prefix_that_samples_share_stands_there_once():
    samples = [
        sample([10, 11, 12, 13], [2, 3]),
        sample([10, 11, 12, 13], [3]),
        sample([10, 11, 14], [2]),
        sample([20, 21], [1]),
    ]
    batch = build_microbatch(samples, [0, 1, 2, 3], layout="shared")
    assert batch.token_ids.tolist() == [[10, 11, 12, 13, 14, 20, 21]]
    assert batch.position_ids is not None
    assert batch.paths is not None
    assert batch.spans is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert batch.paths.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 4, 5, 6]
    assert batch.spans.tolist() == [[0, 4], [4, 4], [2, 3], [0, 2]]
    # At place 1, token 12 is predicted for sample 0 and token 14 for sample 2; at place 2, token 13
    # for samples 0 and 1 at once; at place 5, token 21.
    assert batch.positions.tolist() == [1, 1, 2, 5]
    assert batch.targets.tolist() == [12, 14, 13, 21]
    assert batch.predictions.tolist() == [0, 2, 2, 1, 3]
    assert batch.sequences.tolist() == [0, 0, 1, 2, 3]
    assert batch.advantages.tolist() == pytest.approx([1.2, 1.3, 1.3, 1.4, 2.1])
    assert (batch.num_tokens, batch.num_computed, batch.num_padded) == (13, 7, 7)


def test_predictions_at_other_temperatures_are_others():
    one = sample([10, 11, 12], [2])
    two = dataclasses.replace(one, temperature=1.0)
    batch = build_microbatch([one, two], [0, 1], layout="shared")
    assert batch.positions.tolist() == [1, 1]
    assert [batch.temperatures[i] for i in batch.predictions] == [0.5, 1.0]


TOKENS = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=9), max_size=25)


@given(TOKENS, st.integers(1, 4), st.integers(2, 40))
def test_samples_that_begin_alike_meet(tokens: list[list[int]], ranks: int, max_tokens: int):
    token_ids = [np.array(ids, np.int32) for ids in tokens]
    plan = plan_shared([[ids] for ids in token_ids], ranks, max_tokens)
    assert len(plan) == ranks
    assert len({len(share) for share in plan}) == 1
    flat = [i for share in plan for batch in share for i in batch]
    assert sorted(flat) == list(range(len(tokens)))
    assert [tokens[i] for i in flat] == sorted(tokens)
    for batch in (batch for share in plan for batch in share):
        # What a batch computes: its distinct prefixes, of any length.
        distinct = {tuple(tokens[i][:end]) for i in batch for end in range(1, len(tokens[i]) + 1)}
        assert len(batch) <= 1 or len(distinct) <= max_tokens
        samples = [sample(ids, [1]) for ids in tokens]
        built = build_microbatch(samples, batch, layout="shared")
        assert built.num_computed == len(distinct)


def test_a_shared_prefix_is_predicted_once_at_each_temperature():
    warm, hot = (
        dataclasses.replace(sample([1, 2, last], [1, 2]), temperature=temperature)
        for last, temperature in ((3, 0.5), (4, 2.0))
    )
    batch = build_microbatch([warm, hot], [0, 1], layout="shared")
    # After token 1, both have token 2; after [1, 2], one has 3 and the other 4.
    assert batch.positions.tolist() == [0, 0, 1, 1]
    assert batch.targets.tolist() == [2, 2, 3, 4]
    assert batch.temperatures.tolist() == [0.5, 2.0, 0.5, 2.0]
    assert batch.predictions.tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("layout", get_args(Layout))
def test_the_empty_microbatch_trains_on_nothing(layout: Layout):
    batch = build_microbatch([], [], layout=layout)
    assert batch.token_ids.shape == (1, 2)
    assert len(batch.positions) == len(batch.targets) == len(batch.advantages) == 0
    assert batch.num_tokens == 0


def test_a_scoring_sample_asks_for_every_predictable_token():
    batch = build_microbatch(
        [scoring_sample(np.array([4, 5, 6], np.int32), 1.0)], [0], layout="padded"
    )
    assert batch.positions.tolist() == [0, 1]
    assert batch.targets.tolist() == [5, 6]


def test_what_ranks_computed_goes_back_to_the_tokens_that_asked():
    samples = [sample([10, 11, 12], [1, 2]), sample([20, 21], [1]), sample([30, 31, 32], [2])]
    plan = [[[2, 0]], [[1]]]  # rank 0 has the last sample before the first
    batches = [[build_microbatch(samples, one, layout="padded") for one in s] for s in plan]
    flat = [[np.array([3.2, 1.1, 1.2], np.float32)], [np.array([2.1], np.float32)]]
    back = scatter_back(batches, flat, [one.loss_mask for one in samples])
    expected = [[0.0, 1.1, 1.2], [0.0, 2.1], [0.0, 0.0, 3.2]]
    assert [row.tolist() for row in back] == [pytest.approx(row) for row in expected]


def test_an_even_split_keeps_order_and_every_sample():
    assert split_evenly(7, 3) == [range(0, 2), range(2, 4), range(4, 7)]
    assert split_evenly(2, 3) == [range(0, 1), range(1, 2)]  # no part is empty


def test_padding_of_a_real_batch_is_small():
    samples = make_samples(64, longest=300)
    lengths = [s.num_tokens for s in samples]
    plan = plan_microbatches(lengths, 1, 2048, 0.1)
    padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in plan[0])
    assert 1 - sum(lengths) / padded < 0.1
