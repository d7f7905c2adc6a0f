"""Draws a token for each row of a batch, from one uniform number that the request's seed gives.

worker.py calls it in the engine. The number is a hash of the seed and of the token's
position in the answer, so a token depends neither on the other rows nor on what was drawn before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the output of SplitMix64 for [B] states (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.integer]
) -> npt.NDArray[np.float64]:
    """Return [B] numbers in [0, 1), uniform over positions and over seeds.

    Args:
        seeds: [B] of the requests.
        positions: [B] index of the next token in the answer.
    """
    counters = positions.astype(np.uint64) + np.uint64(1)
    bits = _mix(_mix(seeds + _GOLDEN) + counters * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def pick(logprobs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return [B] tokens: for each row the first whose cumulative probability exceeds its number.

    Args:
        logprobs: [B, V] log-probabilities.
        draws: [B] float64 numbers in [0, 1).
    """
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Rounding must not make a product the total, which no entry exceeds.
    wanted = torch.minimum(draws.unsqueeze(1) * total, torch.nextafter(total, total * 0))
    return torch.searchsorted(cumulative, wanted, right=True).squeeze(1)
