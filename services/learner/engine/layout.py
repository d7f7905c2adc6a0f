"""Layout of a micro-batch: sequences, segments of trajectories, in its arrays.

TrainSample, a trajectory each --SegmentBatch--> TrainSample, a segment each --indices of
microbatches.py--> MicroBatch, ValueBatch --> ranks/engine.py

- padded: a row each, padded on the right. Attention is causal, so no real token sees padding.
- packed: end to end in one row; attention.py says who looks at whom, or, to the attention of
  another library, position ids that start again at 0 tell where one ends.
- shared: end to end in one row too, but what a sequence begins with like the one before it stands
  there once. Nothing is computed twice.

Only the positions that are trained on reach the vocabulary projection, each prediction once. Pure.

Dimension key: S = sequences in a micro-batch (of SegmentBatch: trajectories of the batch), Q =
segments of a batch, T = tokens, N = its trained tokens, M = its predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from agent_r1.learner.config import Layout
from agent_r1.learner.engine.interface import FloatArray, TrainSample
from agent_r1.learner.engine.ranks.messages import MicroBatch, ValueBatch
from agent_r1_proto.prefixes import common_prefix

EMPTY_LENGTH = 2
"""Tokens of a micro-batch without a sample."""

Int64Array = npt.NDArray[np.int64]
N = TypeVar("N", bound=np.generic)
Mask = Callable[[TrainSample], npt.NDArray[np.bool_]]
"""[T] which tokens of a sample count."""


class SegmentBatch:
    """The segments of a batch, trajectory after trajectory."""

    def __init__(self, samples: Sequence[TrainSample]) -> None:
        self.segments = [segment for sample in samples for segment in sample.segments()]
        """[Q] each by itself."""
        self.owners = [i for i, s in enumerate(samples) for _ in range(s.num_segments)]
        """[Q] the trajectory of each."""
        self._samples = samples
        self._firsts = np.cumsum([0, *(sample.num_segments for sample in samples)]).tolist()

    def of(self, trajectory: int, mask: Mask) -> list[int]:
        """Return the numbers of a trajectory's segments in which a token counts, in order."""
        first, end = self._firsts[trajectory : trajectory + 2]
        return [q for q in range(first, end) if mask(self.segments[q]).any()]

    def cut(self, arrays: Sequence[npt.NDArray[N]]) -> list[npt.NDArray[N]]:
        """Return [Q][T] what stands at the tokens of each segment, of [S][T]."""
        return [
            piece
            for sample, array in zip(self._samples, arrays, strict=True)
            for piece in np.split(array, sample.segment_starts)
        ]

    def join(self, pieces: Sequence[npt.NDArray[N]]) -> list[npt.NDArray[N]]:
        """Undo `cut`."""
        return [
            np.concatenate(pieces[first:end])
            for first, end in zip(self._firsts, self._firsts[1:], strict=False)
        ]


def build_microbatch(
    samples: Sequence[TrainSample],
    indices: Sequence[int],
    weights: Sequence[FloatArray] | None = None,
    *,
    layout: Layout,
    owners: Sequence[int] | None = None,
) -> MicroBatch:
    """Lay the chosen samples out and collect their trained positions.

    An empty choice gives the empty micro-batch: one row of two tokens and no trained position, so
    its loss and its gradient are exactly 0 while its rank takes part in every collective.

    Args:
        samples: the batch, a segment each.
        indices: which of them; in the layout "shared", those that begin alike side by side.
        weights: [samples][T] what each token's loss counts; None is 1.
        layout: how they lie.
        owners: [samples] the trajectory of each; None: each is one of its own.
    """
    own = indices if owners is None else [owners[i] for i in indices]
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(own))}
    rows = [samples[i] for i in indices]
    columns = [np.flatnonzero(row.loss_mask) for row in rows]
    tokens, places = _lay_out(indices, rows, layout)
    temperatures = _gather([np.full(row.num_tokens, row.temperature) for row in rows], columns)
    targets = _join([row.token_ids[c] for row, c in zip(rows, columns, strict=True)])
    bits = temperatures.view(np.int32).astype(np.int64)
    asked = np.stack([_before(places, columns), targets, bits], 1)
    distinct, predictions = _distinct(asked)
    ones = [np.ones(row.num_tokens, np.float32) for row in rows]
    return MicroBatch(
        **tokens,
        positions=distinct[:, 0].copy(),
        predictions=predictions,
        targets=distinct[:, 1].copy(),
        temperatures=distinct[:, 2].astype(np.int32).view(np.float32),
        sequences=_join([np.full(len(c), numbers[o]) for o, c in zip(own, columns, strict=True)]),
        rollout_logprobs=_gather([row.rollout_logprobs for row in rows], columns),
        old_logprobs=_gather(
            _or_else([r.old_logprobs for r in rows], [r.rollout_logprobs for r in rows]), columns
        ),
        advantages=_gather([row.advantages for row in rows], columns),
        importance_weights=_gather(_or_else([r.importance_weights for r in rows], ones), columns),
        weights=_gather(ones if weights is None else [weights[i] for i in indices], columns),
    )


def build_value_batch(
    samples: Sequence[TrainSample],
    indices: Sequence[int],
    weight: float = 1.0,
    *,
    layout: Layout,
) -> ValueBatch:
    """Lay the chosen samples out and collect the positions whose value the critic learns.

    Args:
        samples: the batch; samples without a value mask take part without a position.
        indices: which of them; in the layout "shared", those that begin alike side by side.
        weight: what the loss of each token counts in the optimizer batch.
        layout: how they lie.
    """
    rows = [samples[i] for i in indices]
    columns = [np.flatnonzero(value_mask(row)) for row in rows]
    tokens, places = _lay_out(indices, rows, layout)
    distinct, predictions = _distinct(_before(places, columns)[:, None])
    nothing = [np.zeros(row.num_tokens, np.float32) for row in rows]
    return ValueBatch(
        **tokens,
        positions=distinct[:, 0].copy(),
        predictions=predictions,
        returns=_gather(_or_else([row.returns for row in rows], nothing), columns),
        old_values=_gather(_or_else([row.old_values for row in rows], nothing), columns),
        weights=np.full(len(predictions), weight, np.float32),
    )


def loss_mask(sample: TrainSample) -> npt.NDArray[np.bool_]:
    """Return [T] where the policy is trained or scored."""
    return sample.loss_mask


def value_mask(sample: TrainSample) -> npt.NDArray[np.bool_]:
    """Return [T] where the critic learns; nowhere when the sample has no value mask."""
    if sample.value_mask is None:
        return np.zeros(sample.num_tokens, np.bool_)
    return sample.value_mask


def _lay_out(
    indices: Sequence[int], rows: Sequence[TrainSample], layout: Layout
) -> tuple[dict[str, Any], list[Int64Array]]:
    """Return the fields of TokenBatch, and [S][T] where each token stands in the flat array."""
    assert all(row.num_segments == 1 for row in rows), "a row is one sequence; see SegmentBatch"
    token_ids = [row.token_ids for row in rows] or [np.zeros(EMPTY_LENGTH, np.int32)]
    lengths = [len(ids) for ids in token_ids]
    places, prefixes = _padded(lengths) if layout == "padded" else _chained(token_ids, layout)
    height = len(lengths) if layout == "padded" else 1
    computed = sum(lengths) - sum(prefixes)
    width = max(lengths) if layout == "padded" else computed
    flat = np.zeros(height * width, np.int64)
    position_ids = np.zeros_like(flat)
    for ids, place in zip(token_ids, places, strict=True):
        flat[place] = ids
        position_ids[place] = np.arange(len(ids))
    fields = {
        "indices": tuple(indices),
        "token_ids": flat.reshape(height, width),
        "position_ids": None if layout == "padded" else position_ids[None],
        "paths": None if layout == "padded" else np.concatenate(places),
        "spans": None if layout == "padded" else np.stack([prefixes, lengths], 1),
        "num_tokens": sum(row.num_tokens for row in rows),
        "num_computed": computed if rows else 0,
    }
    return fields, places[: len(rows)]


def _padded(lengths: Sequence[int]) -> tuple[list[Int64Array], list[int]]:
    """Return [S][T] places in rows of equal width, and [S] shared prefixes: of no tokens."""
    width = max(lengths)
    places = [line * width + np.arange(length) for line, length in enumerate(lengths)]
    return places, [0] * len(lengths)


def _chained(
    token_ids: Sequence[npt.NDArray[np.int32]], layout: Layout
) -> tuple[list[Int64Array], list[int]]:
    """Return [S][T] places end to end, and [S] tokens that are the trajectory's before it."""
    places: list[Int64Array] = []
    prefixes: list[int] = []
    used = 0
    for number, ids in enumerate(token_ids):
        prefix = 0
        if layout == "shared" and number > 0:
            prefix = common_prefix(token_ids[number - 1], ids)
        own = np.arange(used, used + len(ids) - prefix)
        places.append(np.concatenate((places[-1][:prefix], own)) if prefix else own)
        prefixes.append(prefix)
        used += len(own)
    return places, prefixes


def _distinct(asked: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the [M] distinct lines of [N] lines, and [N] which of them each is."""
    distinct, which = np.unique(asked, axis=0, return_inverse=True)
    return distinct, which.reshape(-1)


def _before(places: Sequence[Int64Array], columns: Sequence[Int64Array]) -> Int64Array:
    """Return [N] where the tokens before the chosen ones stand: they predict them."""
    return _join([place[column - 1] for place, column in zip(places, columns, strict=True)])


def _join(parts: Sequence[npt.NDArray[np.integer]]) -> Int64Array:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)


def _or_else(
    given: Sequence[FloatArray | None], otherwise: Sequence[FloatArray]
) -> list[FloatArray]:
    pairs = zip(given, otherwise, strict=True)
    return [default if values is None else values for values, default in pairs]


def _gather(
    values: Sequence[npt.NDArray[np.floating]], columns: Sequence[Int64Array]
) -> FloatArray:
    picked = [value[column] for value, column in zip(values, columns, strict=True)]
    return np.concatenate([np.zeros(0, np.float32), *picked]).astype(np.float32)
