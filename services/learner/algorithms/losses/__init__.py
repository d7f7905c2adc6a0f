"""Inputs and results of every policy loss, token by token.

engine --LossInputs, LossOptions--> a loss of this folder --PolicyLoss--> aggregation.py

Dimension key: N = trained tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from agent_r1.learner.algorithms.importance import LOG_RATIO_BOUND


@dataclass(frozen=True)
class LossInputs:
    """The trained tokens of one micro-batch, trajectory after trajectory."""

    logprobs: torch.Tensor
    """[N] learner log-probabilities, nats; gradient flows through them."""
    old_logprobs: torch.Tensor
    """[N] the ratio's denominator: log-probabilities before the first optimizer step, nats."""
    advantages: torch.Tensor
    """[N] advantages."""
    sequences: torch.Tensor
    """[N] long, 0 <= row < num_sequences of each token's trajectory. A trajectory is never split
    over micro-batches, but for losses that look at each token by itself (`is_per_token`)."""
    num_sequences: int
    """Number of sequences: at least the trajectories of the micro-batch; some may have no trained
    token."""


@dataclass(frozen=True)
class LossOptions:
    """Settings of the losses; each reads those its formula has."""

    clip_low: float = 0.2
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The probability ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = None
    """PPO and GSPO: where A < 0 the loss is at most -dual_clip * A; None is no bound."""


class PolicyLoss(NamedTuple):
    """Result of a policy loss, token by token."""

    loss: torch.Tensor
    """[N] loss; gradient flows through it."""
    clipped: torch.Tensor
    """[N] bool, detached, True where a bound decides the loss. PPO and GSPO then give the token no
    gradient; CISPO gives it a bounded one."""
    ratio: torch.Tensor
    """[N] probability ratio before clipping, detached."""


class PolicyLossFunction(Protocol):
    """Turns log-probabilities and advantages into token losses."""

    def __call__(self, inputs: LossInputs, options: LossOptions, /) -> PolicyLoss:
        """Return the losses of the tokens of one micro-batch."""
        ...


def probability_ratio(logprobs_N: torch.Tensor, old_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return [N] exp(log p - log p_old), the difference limited to +-20."""
    return torch.exp(torch.clamp(logprobs_N - old_logprobs_N, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
