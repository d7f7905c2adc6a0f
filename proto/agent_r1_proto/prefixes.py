"""Sequences of tokens, and what they begin with alike.

Dimension key: T = tokens of one sequence.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]


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
