"""Division of a batch into optimizer steps, ranks and micro-batches.

policy_engine.py (rank 0) --TrainSample--> plan_batch --RankBatch--> ranks/engine.py, on every rank

Every rank gets equally many steps and micro-batches, since each may hold collectives. Sequences
that begin alike share a micro-batch, or, where prefixes are not shared, those of similar length,
which keeps padding a small share. layout.py lays them out. Pure.

A trajectory of several segments is as many sequences. Those without a token that counts are left
out. The others may go to several micro-batches, unless the loss looks at whole trajectories.

Dimension key: S = trajectories of the batch, Q = their segments, W = those that stay together, N =
trained tokens of a micro-batch, T = tokens of a sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agent_r1.learner.algorithms import is_per_token, is_zero_without_advantage
from agent_r1.learner.algorithms.aggregation import aggregation_weights
from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import FloatArray, LossSpec, TrainSample
from agent_r1.learner.engine.layout import (
    SegmentBatch,
    build_microbatch,
    build_value_batch,
    loss_mask,
    value_mask,
)
from agent_r1.learner.engine.ranks.messages import (
    MicroBatch,
    OptimizerStep,
    RankBatch,
    TokenBatch,
    ValueBatch,
)
from agent_r1.learner.engine.schedule import LearningRates
from agent_r1_proto.prefixes import PrefixOrder, Tokens, order_key

Plan = list[list[list[int]]]
"""[rank][micro-batch] -> indices of samples; every rank has equally many, [] for an empty one."""


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
    batch = SegmentBatch(samples)
    weights = batch.cut(token_weights(samples, trained, spec))
    kept = [i for i in trained if has_gradient(samples[i], spec)]
    idle = [i for i in trained if not has_gradient(samples[i], spec)]
    takes_whole = spec.kind == "policy" and not is_per_token(spec.policy_loss)

    def plan(chosen: list[int]) -> Plan:
        wholes = [batch.of(i, loss_mask) for i in chosen]
        if not takes_whole:
            wholes = [[q] for whole in wholes for q in whole]
        return cut_evenly(batch.segments, wholes, config)

    # Without a sample every rank still runs one empty micro-batch: a step needs a backward pass.
    plans = [plan(kept), plan(idle) if idle else [[] for _ in range(config.ranks)]]
    built = [
        [
            [
                build_microbatch(
                    batch.segments, chosen, weights, layout=config.layout, owners=batch.owners
                )
                for chosen in share
            ]
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
    batch = SegmentBatch(samples)
    wholes = [[q] for i in learned for q in batch.of(i, value_mask)]
    return [
        [
            build_value_batch(batch.segments, chosen, weight, layout=config.layout)
            for chosen in share
        ]
        for share in cut_evenly(batch.segments, wholes, config)
    ]


def cut_evenly(
    segments: Sequence[TrainSample], wholes: Sequence[Sequence[int]], config: EngineConfig
) -> list[list[list[int]]]:
    """Return the micro-batches of each rank, as numbers of segments.

    Args:
        segments: [Q] of the batch.
        wholes: [W] the numbers of segments that one micro-batch takes together.
        config: ranks and sizes of micro-batches.
    """
    most = config.max_tokens_per_microbatch
    if config.layout == "shared":
        tokens = [[segments[q].token_ids for q in whole] for whole in wholes]
        plan = plan_shared(tokens, config.ranks, most)
    else:
        plan = plan_microbatches(
            [sum(segments[q].num_tokens for q in whole) for whole in wholes],
            config.ranks,
            most,
            config.max_padding_share,
            packed=config.layout == "packed",
        )
    cut = [[[q for w in chosen for q in wholes[w]] for chosen in share] for share in plan]
    if config.layout == "shared":
        # A segment of another agent between two that begin alike would part them.
        for chosen in itertools.chain.from_iterable(cut):
            chosen.sort(key=lambda q: order_key(segments[q].token_ids))
    return cut


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
    """Return whether a sample's gradient may be other than exactly 0."""
    if not spec.drop_zero_advantages or spec.kl_coef > 0 or spec.entropy_coef > 0:
        return True
    if spec.kind == "policy" and not is_zero_without_advantage(spec.policy_loss):
        return True
    return bool(np.any(sample.advantages[sample.loss_mask]))


def plan_microbatches(
    lengths: Sequence[int],
    ranks: int,
    max_tokens: int,
    max_padding_share: float,
    *,
    packed: bool = False,
) -> Plan:
    """Spread samples over ranks by tokens, then cut each rank's share into micro-batches.

    Args:
        lengths: [S] tokens per sample, each >= 1.
        ranks: number of ranks.
        max_tokens: most tokens of one micro-batch, padding included; one longer sample is a
            micro-batch of its own.
        max_padding_share: most padding in one micro-batch, as a share of its tokens.
        packed: there is no padding: only `max_tokens` counts.

    Returns:
        A plan that holds every index once; longer samples come first, so memory peaks early.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for i in order:
        rank = loads.index(min(loads))
        shares[rank].append(i)
        loads[rank] += lengths[i]
    return _fill_up(
        [_cut(share, lengths, max_tokens, max_padding_share, packed) for share in shares]
    )


def plan_shared(wholes: Sequence[Sequence[Tokens]], ranks: int, max_tokens: int) -> Plan:
    """Spread wholes over ranks, and cut each rank's share, so that those that begin alike meet.

    Args:
        wholes: [W][Q][T] what one micro-batch takes together: the segments of a trajectory, or one
            of them, at least one.
        ranks: number of ranks.
        max_tokens: most tokens that one micro-batch computes, where a shared prefix counts once;
            one larger whole is a micro-batch of its own.

    Returns:
        A plan that holds every whole once, in which those of a rank are in the order of their
        tokens.
    """
    keys = [min(order_key(ids) for ids in whole) for whole in wholes]
    order = sorted(range(len(wholes)), key=lambda i: keys[i])
    everything = PrefixOrder()
    new = [_add(everything, wholes[i]) for i in order]
    total, seen = max(1, sum(new)), 0
    plan: Plan = [[] for _ in range(ranks)]
    row, computed = PrefixOrder(), 0
    for i, own in zip(order, new, strict=True):
        microbatches = plan[min(seen * ranks // total, ranks - 1)]
        seen += own
        computed += _add(row, wholes[i])
        if microbatches and computed <= max_tokens:
            microbatches[-1].append(i)
        else:
            microbatches.append([i])
            row = PrefixOrder()
            computed = _add(row, wholes[i])
    return _fill_up(plan)


def _add(row: PrefixOrder, whole: Sequence[Tokens]) -> int:
    """Add sequences to a row; return how many of their tokens are computed for them."""
    return sum(len(ids) - row.add(ids)[0] for ids in whole)


def _fill_up(plan: Plan) -> Plan:
    """Give every rank equally many micro-batches."""
    most = max(1, max(len(microbatches) for microbatches in plan))
    for microbatches in plan:
        microbatches.extend([] for _ in range(most - len(microbatches)))
    return plan


def _cut(
    indices: Sequence[int],
    lengths: Sequence[int],
    max_tokens: int,
    max_padding_share: float,
    packed: bool,
) -> list[list[int]]:
    """Cut samples, longest first, into micro-batches."""
    microbatches: list[list[int]] = []
    real = 0
    for i in indices:
        current = microbatches[-1] if microbatches else None
        if current is not None:
            computed = real + lengths[i] if packed else lengths[current[0]] * (len(current) + 1)
            fits = computed <= max_tokens
            dense = computed - (real + lengths[i]) <= max_padding_share * computed
            if fits and dense:
                current.append(i)
                real += lengths[i]
                continue
        microbatches.append([i])
        real = lengths[i]
    return microbatches


def scatter_back(
    batches: Sequence[Sequence[TokenBatch]],
    flat: Sequence[Sequence[FloatArray]],
    masks: Sequence[npt.NDArray[np.bool_]],
) -> list[FloatArray]:
    """Put what every rank computed for its positions back onto the samples' tokens.

    Args:
        batches: [rank][micro-batch] that were computed.
        flat: [rank][micro-batch][N] the results.
        masks: [S][T] the mask whose positions were computed.

    Returns:
        [S][T] the results where the mask is True, 0.0 elsewhere.
    """
    result = [np.zeros(len(mask), np.float32) for mask in masks]
    for rank_batches, rank_flat in zip(batches, flat, strict=True):
        for batch, values in zip(rank_batches, rank_flat, strict=True):
            start = 0
            for index in batch.indices:
                end = start + int(masks[index].sum())
                result[index][masks[index]] = values[start:end]
                start = end
    return result


def scoring_sample(token_ids: npt.NDArray[np.int32], temperature: float) -> TrainSample:
    """Return a sample whose every predictable token is asked for, for log-probabilities only."""
    num_tokens = len(token_ids)
    mask = np.ones(num_tokens, dtype=np.bool_)
    mask[:1] = False
    zeros = np.zeros(num_tokens, dtype=np.float32)
    return TrainSample(np.asarray(token_ids, np.int32), mask, zeros, zeros, temperature)


def split_evenly(count: int, parts: int) -> list[range]:
    """Cut 0 .. count - 1, in order, into ranges whose sizes differ by at most 1.

    Returns:
        `parts` of them, or `count` ranges of one where there are fewer things than parts.
    """
    parts = min(parts, count)
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]
