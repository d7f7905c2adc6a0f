"""Micro-batches: which trajectories go through the model together, on which rank.

engine --TrainSample--> plan_microbatches, build_microbatch --MicroBatch--> logprobs.PolicyModule

Trajectories of similar length share a micro-batch and are padded on the right. Attention is
causal, so no real token sees padding and no mask is needed; sorting keeps padding a small share.
Only the positions that are trained on reach the vocabulary projection.

Dimension key: B = trajectories in a micro-batch, L = its longest, N = its trained tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from agent_r1.learner.engine import TrainSample

Plan = list[list[list[int]]]
"""[rank][micro-batch] -> indices of samples; every rank has equally many, [] for an empty one."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. Arrays only, so that it travels to other ranks and devices."""

    indices: tuple[int, ...]
    """[B] which samples these are, in row order."""
    token_ids: npt.NDArray[np.int64]
    """[B, L] right-padded with 0."""
    positions: npt.NDArray[np.int64]
    """[N] index into [B * L] of the hidden state that predicts a trained token."""
    targets: npt.NDArray[np.int64]
    """[N] the trained tokens."""
    temperatures: npt.NDArray[np.float32]
    """[N] sampling temperature of each trained token."""
    old_logprobs: npt.NDArray[np.float32]
    """[N] the probability ratio's denominator."""
    advantages: npt.NDArray[np.float32]
    """[N] advantages; weights for the loss "nll"."""
    num_tokens: int
    """Tokens without padding."""

    @property
    def num_padded(self) -> int:
        """Tokens computed, padding included."""
        return int(self.token_ids.size)

    def with_old_logprobs(self, old_logprobs: npt.NDArray[np.float32]) -> MicroBatch:
        """Return a copy with another ratio denominator."""
        return replace(self, old_logprobs=old_logprobs)


def plan_microbatches(
    lengths: Sequence[int], ranks: int, max_tokens: int, max_padding_share: float
) -> Plan:
    """Spread samples over ranks by tokens, then cut each rank's share into micro-batches.

    Args:
        lengths: [S] tokens per sample, each >= 1.
        ranks: number of ranks.
        max_tokens: most tokens of one micro-batch, padding included; one longer sample is a
            micro-batch of its own.
        max_padding_share: most padding in one micro-batch, as a share of its tokens.

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
    plan = [_cut(share, lengths, max_tokens, max_padding_share) for share in shares]
    most = max(1, max(len(microbatches) for microbatches in plan))
    for microbatches in plan:
        microbatches.extend([] for _ in range(most - len(microbatches)))
    return plan


def _cut(
    indices: Sequence[int], lengths: Sequence[int], max_tokens: int, max_padding_share: float
) -> list[list[int]]:
    """Cut samples, longest first, into micro-batches."""
    microbatches: list[list[int]] = []
    real = 0
    for i in indices:
        current = microbatches[-1] if microbatches else None
        if current is not None:
            width = lengths[current[0]]
            padded = width * (len(current) + 1)
            fits = padded <= max_tokens
            dense = padded - (real + lengths[i]) <= max_padding_share * padded
            if fits and dense:
                current.append(i)
                real += lengths[i]
                continue
        microbatches.append([i])
        real = lengths[i]
    return microbatches


def build_microbatch(samples: Sequence[TrainSample], indices: Sequence[int]) -> MicroBatch:
    """Pad the chosen samples to one array and collect their trained positions.

    An empty choice gives the empty micro-batch: one row of two tokens and no trained position, so
    its loss and its gradient are exactly 0 while its rank takes part in every collective.
    """
    rows = [samples[i] for i in indices]
    width = max((row.num_tokens for row in rows), default=2)
    token_ids = np.zeros((max(1, len(rows)), width), dtype=np.int64)
    positions: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    columns: list[npt.NDArray[np.int64]] = []
    for row_index, row in enumerate(rows):
        token_ids[row_index, : row.num_tokens] = row.token_ids
        trained = np.flatnonzero(row.loss_mask)
        columns.append(trained)
        positions.append(row_index * width + trained - 1)

    def gather(values: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
        picked = [value[column] for value, column in zip(values, columns, strict=True)]
        return np.concatenate([np.zeros(0, np.float32), *picked]).astype(np.float32)

    flat = np.concatenate(positions)
    return MicroBatch(
        indices=tuple(indices),
        token_ids=token_ids,
        positions=flat,
        targets=token_ids.reshape(-1)[flat + 1],
        temperatures=gather([np.full(row.num_tokens, row.temperature, np.float32) for row in rows]),
        old_logprobs=gather([row.rollout_logprobs for row in rows]),
        advantages=gather([row.advantages for row in rows]),
        num_tokens=sum(row.num_tokens for row in rows),
    )


def scoring_sample(token_ids: npt.NDArray[np.int32], temperature: float) -> TrainSample:
    """Return a sample whose every predictable token is asked for, for log-probabilities only."""
    num_tokens = len(token_ids)
    mask = np.ones(num_tokens, dtype=np.bool_)
    mask[:1] = False
    zeros = np.zeros(num_tokens, dtype=np.float32)
    return TrainSample(np.asarray(token_ids, np.int32), mask, zeros, zeros, temperature)


def split_evenly(count: int, parts: int) -> list[range]:
    """Cut 0 .. count - 1, in order, into `parts` ranges whose sizes differ by at most 1.

    Raises:
        ValueError: there are more parts than things.
    """
    if parts > count:
        raise ValueError(
            f"optimizer_steps ({parts}) must be <= the {count} samples of the batch; lower "
            "learner.optimizer_steps_per_batch"
        )
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(bounds)]
