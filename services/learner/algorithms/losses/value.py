"""The critic's loss: squared error to the returns, clipped around the values before the batch.

Source: PPO, arXiv:1707.06347, equation 9; the clip as in its authors' code (baselines, ppo2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class ValueLoss(NamedTuple):
    """The critic's loss, token by token."""

    loss: torch.Tensor
    """[N] loss; gradient flows through it."""
    clipped: torch.Tensor
    """[N] bool, detached, True where the bound decides the loss: the token has no gradient."""


def clipped_value_loss(
    values_N: torch.Tensor,
    old_values_N: torch.Tensor,
    returns_N: torch.Tensor,
    *,
    clip: float | None = 0.5,
) -> ValueLoss:
    """Compute 0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) for each token.

    Args:
        values_N: [N] the critic's values; gradient flows through them.
        old_values_N: [N] its values before the first optimizer step on the batch.
        returns_N: [N] what the values should have been.
        clip: how far the loss follows a value in one batch, in reward units, above 0; None is no
            bound.
    """
    plain = (values_N - returns_N) ** 2
    if clip is None:
        return ValueLoss(0.5 * plain, torch.zeros_like(plain, dtype=torch.bool))
    near = torch.clamp(values_N, old_values_N - clip, old_values_N + clip)
    bounded = (near - returns_N) ** 2
    return ValueLoss(0.5 * torch.maximum(plain, bounded), (bounded > plain).detach())
