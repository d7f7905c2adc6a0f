"""What rank 0 tells each rank to train on: policy_engine.py --TrainOrder--> deepspeed_engine.py."""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1.learner.batching import MicroBatch
from agent_r1.learner.engine import LossSpec


@dataclass(frozen=True)
class StepOrder:
    """One optimizer step of one rank."""

    microbatches: list[MicroBatch]
    total_weight: float
    """What the summed token losses of all ranks are divided by."""
    lr: float


@dataclass(frozen=True)
class TrainOrder:
    """One batch of one rank."""

    spec: LossSpec
    steps: list[StepOrder]
