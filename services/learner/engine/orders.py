"""What every rank is to train on: a batch, cut into optimizer steps, ranks and micro-batches.

policy_engine.py (rank 0) --samples--> plan_batch --RankBatch--> rank_worker.py, on every rank

Pure. Every rank gets equally many steps and micro-batches, since each may hold collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from agent_r1.learner.algorithms import is_zero_without_advantage
from agent_r1.learner.algorithms.aggregation import aggregation_weights
from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import FloatArray, LossSpec, TrainSample
from agent_r1.learner.engine.microbatches import (
    MicroBatch,
    TokenBatch,
    ValueBatch,
    build_microbatch,
    build_value_batch,
    plan_microbatches,
    split_evenly,
    value_mask,
)
from agent_r1.learner.engine.schedule import LearningRates


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of one rank."""

    microbatches: list[MicroBatch]
    """Run forward and backward."""
    lr: float | None
    """The policy's; None leaves the policy alone."""
    measured: list[MicroBatch] = field(default_factory=list)
    """Run forward only, for the metrics: their gradient is exactly 0."""
    value_batches: list[ValueBatch] = field(default_factory=list)
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


def plan_batch(
    samples: Sequence[TrainSample],
    spec: LossSpec,
    config: EngineConfig,
    rates: LearningRates,
    steps_before: int,
) -> list[RankBatch]:
    """Cut a batch into optimizer steps, ranks and micro-batches.

    Steps are equal shares of the samples, in order; there are fewer where samples are. A step in
    which no token counts, for policy or critic, is left out. It keeps its place in the schedule.

    Args:
        samples: the batch, at least one.
        spec: the loss; `optimizer_steps` of it are wanted.
        config: ranks and sizes of micro-batches.
        rates: the learning rate of each step of the run.
        steps_before: optimizer steps of the run before this batch.

    Returns:
        One order a rank, all with the same number of steps.

    Raises:
        ValueError: a step of an "nll" batch has no token to train on.
    """
    orders = [RankBatch(spec, []) for _ in range(config.ranks)]
    for offset, part in enumerate(split_evenly(len(samples), spec.optimizer_steps)):
        trained = [i for i in part if samples[i].loss_mask.any()] if spec.trains_policy else []
        learned = [i for i in part if value_mask(samples[i]).any()]
        if spec.kind == "nll":
            _check_weights(samples, part)
        if not (trained or learned):
            continue
        step = steps_before + offset
        lr = rates.policy(step) if trained else None
        critic_lr = rates.critic(step) if learned else None
        policy = _cut_policy(samples, trained, spec, config)
        values = _cut_values(samples, learned, config)
        for order, (batches, measured), value_batches in zip(orders, policy, values, strict=True):
            order.steps.append(OptimizerStep(batches, lr, measured, value_batches, critic_lr))
    return orders


def _check_weights(samples: Sequence[TrainSample], part: Sequence[int]) -> None:
    if not sum(float(samples[i].advantages[samples[i].loss_mask].sum()) for i in part) > 0:
        raise ValueError(
            f"none of the tokens of {len(part)} samples counts in the loss; a batch needs at "
            "least one token to learn"
        )


def _cut_policy(
    samples: Sequence[TrainSample], trained: Sequence[int], spec: LossSpec, config: EngineConfig
) -> list[tuple[list[MicroBatch], list[MicroBatch]]]:
    """Return each rank's micro-batches of one step: with gradient, and for metrics only."""
    if not trained:
        return [([], []) for _ in range(config.ranks)]
    weights = token_weights(samples, trained, spec)
    kept = [i for i in trained if has_gradient(samples[i], spec)]
    idle = [i for i in trained if not has_gradient(samples[i], spec)]
    # Without a sample every rank still runs one empty micro-batch: a step needs a backward pass.
    plans = [cut_evenly(samples, kept, config)]
    plans.append(cut_evenly(samples, idle, config) if idle else [[] for _ in range(config.ranks)])
    built = [
        [
            [build_microbatch(samples, chosen, weights, packed=config.packing) for chosen in share]
            for share in plan
        ]
        for plan in plans
    ]
    return list(zip(built[0], built[1], strict=True))


def _cut_values(
    samples: Sequence[TrainSample], learned: Sequence[int], config: EngineConfig
) -> list[list[ValueBatch]]:
    """Return each rank's micro-batches of the critic for one step."""
    if not learned:
        return [[] for _ in range(config.ranks)]
    weight = 1 / sum(int(value_mask(samples[i]).sum()) for i in learned)
    return [
        [build_value_batch(samples, chosen, weight, packed=config.packing) for chosen in share]
        for share in cut_evenly(samples, learned, config)
    ]


def cut_evenly(
    samples: Sequence[TrainSample], chosen: Sequence[int], config: EngineConfig
) -> list[list[list[int]]]:
    """Return the micro-batches of each rank, as indices of samples."""
    plan = plan_microbatches(
        [samples[i].num_tokens for i in chosen],
        config.ranks,
        config.max_tokens_per_microbatch,
        config.max_padding_share,
        packed=config.packing,
    )
    return [[[chosen[i] for i in indices] for indices in share] for share in plan]


def token_weights(
    samples: Sequence[TrainSample], part: Sequence[int], spec: LossSpec
) -> list[FloatArray]:
    """Return [S][T] what each token's loss counts in one optimizer batch.

    Args:
        samples: the whole batch.
        part: the samples of this optimizer batch, with at least one token that counts; the others
            weigh 0.
        spec: the aggregation; for "nll" tokens are weighed by `advantages`.
    """
    weights = [np.zeros(sample.num_tokens, np.float32) for sample in samples]
    if spec.kind == "nll":
        total = sum(float(samples[i].advantages[samples[i].loss_mask].sum()) for i in part)
        for i in part:
            weights[i] = samples[i].advantages / np.float32(total)
        return weights
    counts = [int(samples[i].loss_mask.sum()) for i in part]
    scalars = aggregation_weights(counts, spec.aggregation, fixed_length=spec.fixed_length)
    for i, scalar in zip(part, scalars, strict=True):
        weights[i] += np.float32(scalar)
    return weights


def has_gradient(sample: TrainSample, spec: LossSpec) -> bool:
    """Whether a sample's gradient may be other than exactly 0."""
    if not spec.drop_zero_advantages or spec.kl_coef > 0 or spec.entropy_coef > 0:
        return True
    if spec.kind == "policy" and not is_zero_without_advantage(spec.policy_loss):
        return True
    return bool(np.any(sample.advantages[sample.loss_mask]))
