"""Gathering tokens by mask, the steps estimators share, and scattering back.

What is computed between `gather` and `scatter` never sees a token outside the mask: discounting
goes from the last sampled token before a tool's answer straight to the first one after it.

Sums are `math.fsum`, which is exact, so that the order of a batch changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WHITEN_EPS = 1e-8
"""Added to the variance before its root."""


def gather(
    arrays: Sequence[npt.NDArray[np.floating]], masks: Sequence[npt.NDArray[np.bool_]]
) -> list[npt.NDArray[np.float64]]:
    """Return [N][P] the entries where the mask is True, in order."""
    return [
        np.asarray(array, dtype=np.float64)[mask] for array, mask in zip(arrays, masks, strict=True)
    ]


def scatter(
    packed: Sequence[npt.NDArray[np.float64]], masks: Sequence[npt.NDArray[np.bool_]]
) -> list[npt.NDArray[np.float32]]:
    """Undo `gather`: [N][T], exactly 0.0 where the mask is False."""
    scattered: list[npt.NDArray[np.float32]] = []
    for entries, mask in zip(packed, masks, strict=True):
        array = np.zeros(mask.shape, dtype=np.float32)
        array[mask] = entries
        scattered.append(array)
    return scattered


def spread(
    scalars_N: Sequence[float], masks: Sequence[npt.NDArray[np.bool_]]
) -> list[npt.NDArray[np.float64]]:
    """Return [N][P] each trajectory's scalar on all of its packed tokens."""
    return [
        np.full(int(mask.sum()), scalar, dtype=np.float64)
        for scalar, mask in zip(scalars_N, masks, strict=True)
    ]


def total_rewards(
    token_rewards: Sequence[npt.NDArray[np.floating]], masks: Sequence[npt.NDArray[np.bool_]]
) -> list[float]:
    """Return [N] the sum of each trajectory's rewards, process rewards included."""
    return [math.fsum(rewards) for rewards in gather(token_rewards, masks)]


def rewards_to_go(rewards_P: npt.NDArray[np.float64], gamma: float) -> npt.NDArray[np.float64]:
    """Return [P] G_t = r_t + gamma * G_{t+1}, with G = 0 after the last packed token."""
    following = 0.0
    returns: list[float] = []
    for reward in reversed(rewards_P.tolist()):
        following = reward + gamma * following
        returns.append(following)
    return np.array(returns[::-1], dtype=np.float64)


def whiten(packed: Sequence[npt.NDArray[np.float64]]) -> list[npt.NDArray[np.float64]]:
    """Shift and scale all packed tokens of a batch to mean 0 and variance 1.

    Returns:
        [N][P] (x - mean) / sqrt(var + 1e-8), var with Bessel's correction; exactly 0.0 when all
        tokens are equal, which a batch of one token always is.
    """
    tokens = np.concatenate(packed)
    # Rounding in the mean would be blown up 10,000 times by the root of the eps.
    if np.all(tokens == tokens[0]):
        return [np.zeros_like(entries) for entries in packed]
    mean = math.fsum(tokens) / len(tokens)
    variance = math.fsum((tokens - mean) ** 2) / (len(tokens) - 1)
    scale = math.sqrt(variance + WHITEN_EPS)
    return [(entries - mean) / scale for entries in packed]
