"""What rank 0 tells each rank to train on: policy_engine.py --TrainOrder--> rank_engine.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent_r1.learner.batching import MicroBatch, ValueBatch
from agent_r1.learner.engine import LossSpec


@dataclass(frozen=True)
class StepOrder:
    """One optimizer step of one rank."""

    microbatches: list[MicroBatch]
    lr: float
    value_batches: list[ValueBatch] = field(default_factory=list)
    """The critic's; [] where there is none."""


@dataclass(frozen=True)
class TrainOrder:
    """One batch of one rank."""

    spec: LossSpec
    steps: list[StepOrder]
