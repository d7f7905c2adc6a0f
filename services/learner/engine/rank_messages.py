"""What rank 0 tells every rank: how to build its part of the engine, and what to compute.

policy_engine.py (rank 0) --EngineSetup, RankBatch--> rank_engine.py (every rank) --TrainReply-->
policy_engine.py. Arrays and configuration only, so that they travel between processes.

Dimension key: S = trajectories in a micro-batch, N = its trained tokens; padded, B = S rows of
L = its longest; packed, B = 1 row of L = all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import LossSpec
from agent_r1_service.config import ModelConfig


@dataclass(frozen=True)
class CriticSetup:
    """The critic's backbone and learning rate."""

    model: ModelConfig
    lr: float
    """After warm-up."""
    warmup_steps: int = 0
    """Optimizer steps at the start of the run that train the critic alone."""


@dataclass(frozen=True)
class EngineSetup:
    """Everything a rank needs to build its part of the engine."""

    model: ModelConfig
    config: EngineConfig
    seed: int
    with_reference: bool
    """Keep the configured model for the KL term."""
    table_name: str
    """"learner" or "sft": named in messages about keys."""
    critic: CriticSetup | None = None
    deterministic: bool = False
    """Use deterministic kernels only."""


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one forward pass."""

    indices: tuple[int, ...]
    """[S] which samples these are, in their order in `token_ids`."""
    token_ids: npt.NDArray[np.int64]
    """[B, L] right-padded with 0, or packed."""
    position_ids: npt.NDArray[np.int64] | None
    """[B, L] of a packed batch: the token's place in its own trajectory; None when padded."""
    positions: npt.NDArray[np.int64]
    """[N] index into [B * L] of the hidden state that predicts a trained token."""
    num_tokens: int
    """Tokens without padding."""

    @property
    def num_padded(self) -> int:
        """Tokens computed, padding included."""
        return int(self.token_ids.size)


@dataclass(frozen=True)
class MicroBatch(TokenBatch):
    """One forward pass of the policy."""

    targets: npt.NDArray[np.int64]
    """[N] the trained tokens."""
    sequences: npt.NDArray[np.int64]
    """[N] which of the S trajectories each trained token belongs to."""
    temperatures: npt.NDArray[np.float32]
    """[N] sampling temperature of each trained token."""
    rollout_logprobs: npt.NDArray[np.float32]
    """[N] log-probabilities at sampling."""
    old_logprobs: npt.NDArray[np.float32]
    """[N] the probability ratio's denominator."""
    advantages: npt.NDArray[np.float32]
    """[N] advantages."""
    importance_weights: npt.NDArray[np.float32]
    """[N] factor of the policy loss."""
    weights: npt.NDArray[np.float32]
    """[N] what each token's loss counts in the optimizer batch; see aggregation.py."""


@dataclass(frozen=True)
class ValueBatch(TokenBatch):
    """One forward pass of the critic."""

    returns: npt.NDArray[np.float32]
    """[N] what the critic should say."""
    old_values: npt.NDArray[np.float32]
    """[N] what it said before the batch."""
    weights: npt.NDArray[np.float32]
    """[N] what each token's loss counts in the optimizer batch."""


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of one rank."""

    microbatches: list[MicroBatch]
    """Run forward and backward."""
    lr: float | None
    """The policy's; None leaves the policy alone."""
    measured: list[MicroBatch] = field(default_factory=list[MicroBatch])
    """Run forward only, for the metrics: their gradient is exactly 0."""
    value_batches: list[ValueBatch] = field(default_factory=list[ValueBatch])
    """The critic's; [] where it learns nothing."""
    critic_lr: float | None = None
    """The critic's; None leaves it alone."""


@dataclass(frozen=True)
class RankBatch:
    """One batch of one rank."""

    spec: LossSpec
    steps: list[OptimizerStep]
    """Those with something to learn: fewer than `spec.optimizer_steps` where filters left nothing.
    """

    def policy_batches(self) -> Iterator[TokenBatch]:
        """Yield every micro-batch that the policy runs forward."""
        for step in self.steps:
            yield from step.microbatches
            yield from step.measured


@dataclass(frozen=True)
class TrainReply:
    """What came of one batch."""

    metrics: dict[str, float] = field(default_factory=dict[str, float])
    not_finite: tuple[int, ...] = ()
    """Samples of micro-batches whose loss is not finite; the optimizer step was not taken."""
