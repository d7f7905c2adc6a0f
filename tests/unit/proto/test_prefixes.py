"""Sequences that begin alike: who begins like whom, and what is left of them without that."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agent_r1_proto.prefixes import (
    LEAST_REPEAT,
    PrefixOrder,
    common_prefix,
    find_repeats,
    leave_out,
    put_back,
)

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


def arrays(sequences: list[list[int]]) -> list[np.ndarray]:
    return [np.array(ids, np.int32) for ids in sequences]


@given(SEQUENCES)
def test_a_sequence_is_compared_with_all_before_it(sequences: list[list[int]]):
    order, given_ = PrefixOrder(), arrays(sequences)
    for i, ids in enumerate(given_):
        shared, which = order.add(ids)
        assert shared == max((common_prefix(ids, other) for other in given_[:i]), default=0)
        assert shared == 0 or common_prefix(ids, given_[which]) == shared
        assert which < max(i, 1)


@given(SEQUENCES, st.integers(1, 4))
def test_what_is_left_out_comes_back(sequences: list[list[int]], least: int):
    token_ids = np.concatenate(arrays(sequences))
    starts = np.cumsum([len(ids) for ids in sequences])[:-1].tolist()
    repeats = find_repeats(token_ids, starts, least)
    assert all(shared == 0 or shared >= least for shared, _ in repeats)
    left = leave_out(token_ids, starts, repeats)
    assert len(left) == len(token_ids) - sum(shared for shared, _ in repeats)
    np.testing.assert_array_equal(put_back(left, starts, repeats), token_ids)


def test_few_tokens_are_written_again():
    for alike, expected in ((LEAST_REPEAT - 1, 0), (LEAST_REPEAT, LEAST_REPEAT)):
        ids = np.array([1] * alike + [2] + [1] * alike + [3], np.int32)
        assert find_repeats(ids, [alike + 1]) == [(0, 0), (expected, 0)]
