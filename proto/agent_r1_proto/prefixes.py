"""Sequences of tokens, and what they begin with alike.

Dimension key: T = tokens of one sequence, or of sequences end to end.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Repeats = list[tuple[int, int]]
"""Repetition of each sequence: how many tokens it begins with like an earlier one, and the number
of that."""

LEAST_REPEAT = 64
"""Tokens; fewer are written again, since naming them takes bytes too."""


def common_prefix(one: Tokens, other: Tokens) -> int:
    """Return how many tokens two sequences begin with alike."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def order_key(token_ids: Tokens) -> bytes:
    """Return what sorts sequences by their tokens, so that those that begin alike meet."""
    return token_ids.astype(">u4").tobytes()


class PrefixOrder:
    """Sequences in the order of their tokens.

    There, what a sequence shares with any other, it shares with one of its two neighbours.
    """

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._sequences: list[tuple[int, Tokens]] = []

    def add(self, token_ids: Tokens) -> tuple[int, int]:
        """Add a sequence, and compare it with those before it.

        Args:
            token_ids: [T] its tokens.

        Returns:
            How many tokens it begins with like one of them, at most, and the number of that one, in
            the order in which they were added; 0 and 0 where there is none.
        """
        key = order_key(token_ids)
        place = bisect_left(self._keys, key)
        neighbours = self._sequences[max(0, place - 1) : place + 1]
        shared = [(common_prefix(token_ids, ids), number) for number, ids in neighbours]
        self._sequences.insert(place, (len(self._keys), token_ids))
        self._keys.insert(place, key)
        return max(shared, default=(0, 0))


def find_repeats(token_ids: Tokens, starts: Sequence[int], least: int = LEAST_REPEAT) -> Repeats:
    """Return what sequences begin with alike; 0 and 0 of one that begins like none.

    Args:
        token_ids: [T] sequences end to end.
        starts: where those after the first begin.
        least: tokens alike that are worth naming.
    """
    if not starts:
        return [(0, 0)]
    order = PrefixOrder()
    found = [order.add(sequence) for sequence in np.split(token_ids, starts)]
    return [(shared, which) if shared >= least else (0, 0) for shared, which in found]


def leave_out(token_ids: Tokens, starts: Sequence[int], repeats: Repeats) -> Tokens:
    """Return sequences end to end, without what earlier ones begin with."""
    sequences = np.split(token_ids, starts)
    return np.concatenate([s[shared:] for s, (shared, _) in zip(sequences, repeats, strict=True)])


def put_back(left: Tokens, starts: Sequence[int], repeats: Repeats) -> Tokens:
    """Undo `leave_out`.

    Raises:
        ValueError: these cannot be what it left.
    """
    length = len(left) + sum(shared for shared, _ in repeats)
    bounds = list(itertools.pairwise([0, *starts, length]))
    token_ids = np.zeros(length, left.dtype)
    used = 0
    for i, ((start, end), (shared, which)) in enumerate(zip(bounds, repeats, strict=True)):
        first, last = bounds[which] if 0 <= which < i else (0, 0)
        if not 0 <= shared <= min(end - start, last - first):
            raise ValueError(f"sequence {i} cannot begin with {shared} tokens of sequence {which}")
        token_ids[start : start + shared] = token_ids[first : first + shared]
        rest = end - start - shared
        token_ids[start + shared : end] = left[used : used + rest]
        used += rest
    return token_ids
