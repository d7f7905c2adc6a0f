"""Weighted negative log-likelihood: the loss of the SFT warm start."""

from __future__ import annotations

import torch


def weighted_nll(logprobs_N: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """Return [N] -weight * log-probability; the engine divides the sum by the sum of weights."""
    return -weights_N * logprobs_N
