"""Aggregation: worked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.learner.algorithms.aggregation import aggregation_weights


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    # 1, 3 and 0 tokens: 4 tokens, 2 sequences that have any
    [
        ("token_mean", [1 / 4, 1 / 4, 0]),
        ("sequence_mean", [1 / 2, 1 / 6, 0]),
        ("sequence_sum", [1 / 2, 1 / 2, 0]),
        ("fixed_length", [1 / 20, 1 / 20, 0]),
    ],
)
def test_weights_by_hand(aggregation: Any, expected: list[float]):
    assert aggregation_weights([1, 3, 0], aggregation, fixed_length=10) == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_the_weights_of_a_mean_sum_to_1(aggregation: Any):
    counts = [5, 1, 0, 17]
    weights = aggregation_weights(counts, aggregation)
    assert sum(n * w for n, w in zip(counts, weights, strict=True)) == pytest.approx(1)
