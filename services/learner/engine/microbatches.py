"""Micro-batches: which trajectories go through the model together, on which rank.

engine --TrainSample--> plan_microbatches, build_microbatch --MicroBatch--> model.PolicyModule

Trajectories of similar length share a micro-batch and are padded on the right. Attention is
causal, so no real token sees padding and no mask is needed; sorting keeps padding a small share.
Packed, they stand end to end in one row without padding, and position ids that start again at 0
tell the model where one ends: attention does not cross. Only the positions that are trained on
reach the vocabulary projection.

Dimension key: S = trajectories in a micro-batch, N = its trained tokens; padded, B = S rows of
L = its longest; packed, B = 1 row of L = all tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from agent_r1.learner.engine.interface import FloatArray, TrainSample

EMPTY_SHAPE = (1, 2)
"""Of the array of a micro-batch without a sample."""
Plan = list[list[list[int]]]
"""[rank][micro-batch] -> indices of samples; every rank has equally many, [] for an empty one."""


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one forward pass. Arrays only, so that it travels to other ranks."""

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
    plan = [_cut(share, lengths, max_tokens, max_padding_share, packed) for share in shares]
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


def build_microbatch(
    samples: Sequence[TrainSample],
    indices: Sequence[int],
    weights: Sequence[FloatArray] | None = None,
    *,
    packed: bool = False,
) -> MicroBatch:
    """Lay the chosen samples out as one array and collect their trained positions.

    An empty choice gives the empty micro-batch: one row of two tokens and no trained position, so
    its loss and its gradient are exactly 0 while its rank takes part in every collective.

    Args:
        samples: the batch.
        indices: which of them.
        weights: [samples][T] what each token's loss counts; None is 1.
        packed: end to end in one row, not padded.
    """
    rows = [samples[i] for i in indices]
    layout = _lay_out(rows, [row.loss_mask for row in rows], packed)
    columns = layout.columns
    ones = [np.ones(row.num_tokens, np.float32) for row in rows]
    return MicroBatch(
        indices=tuple(indices),
        token_ids=layout.token_ids,
        position_ids=layout.position_ids,
        positions=layout.positions,
        num_tokens=sum(row.num_tokens for row in rows),
        targets=layout.token_ids.reshape(-1)[layout.positions + 1],
        sequences=np.repeat(np.arange(len(rows)), np.array([len(c) for c in columns], np.int64)),
        temperatures=_gather(
            [one * row.temperature for one, row in zip(ones, rows, strict=True)], columns
        ),
        rollout_logprobs=_gather([row.rollout_logprobs for row in rows], columns),
        old_logprobs=_gather(
            [
                row.rollout_logprobs if row.old_logprobs is None else row.old_logprobs
                for row in rows
            ],
            columns,
        ),
        advantages=_gather([row.advantages for row in rows], columns),
        importance_weights=_gather(
            [
                one if row.importance_weights is None else row.importance_weights
                for one, row in zip(ones, rows, strict=True)
            ],
            columns,
        ),
        weights=_gather(ones if weights is None else [weights[i] for i in indices], columns),
    )


def build_value_batch(
    samples: Sequence[TrainSample],
    indices: Sequence[int],
    weight: float = 1.0,
    *,
    packed: bool = False,
) -> ValueBatch:
    """Lay the chosen samples out and collect the positions whose value the critic learns.

    Args:
        samples: the batch; samples without a value mask take part without a position.
        indices: which of them.
        weight: what the loss of each token counts in the optimizer batch.
        packed: end to end in one row, not padded.
    """
    rows = [samples[i] for i in indices]
    nothing = [np.zeros(row.num_tokens, np.float32) for row in rows]
    layout = _lay_out(rows, [value_mask(row) for row in rows], packed)

    def values(name: Literal["returns", "old_values"]) -> FloatArray:
        given = [getattr(row, name) for row in rows]
        filled = [n if value is None else value for value, n in zip(given, nothing, strict=True)]
        return _gather(filled, layout.columns)

    return ValueBatch(
        indices=tuple(indices),
        token_ids=layout.token_ids,
        position_ids=layout.position_ids,
        positions=layout.positions,
        num_tokens=sum(row.num_tokens for row in rows),
        returns=values("returns"),
        old_values=values("old_values"),
        weights=np.full(len(layout.positions), weight, np.float32),
    )


def value_mask(sample: TrainSample) -> npt.NDArray[np.bool_]:
    """Return [T] where the critic learns; nowhere when the sample has no value mask."""
    if sample.value_mask is None:
        return np.zeros(sample.num_tokens, np.bool_)
    return sample.value_mask


@dataclass(frozen=True)
class _Layout:
    """Where the tokens of a micro-batch stand; the fields are those of TokenBatch."""

    token_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64] | None
    positions: npt.NDArray[np.int64]
    columns: list[npt.NDArray[np.int64]]
    """[S] per trajectory, the tokens its mask chooses."""


def _lay_out(
    rows: Sequence[TrainSample], masks: Sequence[npt.NDArray[np.bool_]], packed: bool
) -> _Layout:
    lengths = [row.num_tokens for row in rows]
    shape = (1, sum(lengths)) if packed else (len(rows), max(lengths, default=0))
    token_ids = np.zeros(shape if rows else EMPTY_SHAPE, dtype=np.int64)
    width = token_ids.shape[1]
    starts = itertools.accumulate(lengths if packed else [width] * len(rows), initial=0)
    flat = token_ids.reshape(-1)
    position_ids = np.arange(width)[None] if packed else None
    columns = [np.flatnonzero(mask) for mask in masks]
    positions: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    for row, start, column in zip(rows, starts, columns, strict=False):  # one more start: the end
        flat[start : start + row.num_tokens] = row.token_ids
        positions.append(start + column - 1)
        if position_ids is not None:
            position_ids[0, start : start + row.num_tokens] = np.arange(row.num_tokens)
    return _Layout(token_ids, position_ids, np.concatenate(positions), columns)


def _gather(
    values: Sequence[npt.NDArray[np.floating]], columns: Sequence[npt.NDArray[np.int64]]
) -> FloatArray:
    picked = [value[column] for value, column in zip(values, columns, strict=True)]
    return np.concatenate([np.zeros(0, np.float32), *picked]).astype(np.float32)


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
