"""A batch as the model computes it: every segment of its trajectories is a sequence of its own.

policy_engine.py, microbatches.py --TrainSample, a trajectory each--> here --TrainSample, a segment
each--> layout.py. What counts trajectories (weights, optimizer steps) is decided before. Pure.

Dimension key: S = trajectories of the batch, Q = their segments, T = tokens of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from agent_r1.learner.engine.interface import TrainSample

N = TypeVar("N", bound=np.generic)


class SegmentBatch:
    """The segments of a batch, trajectory after trajectory."""

    def __init__(self, samples: Sequence[TrainSample]) -> None:
        self.segments = [segment for sample in samples for segment in sample.segments()]
        """[Q] each by itself."""
        self.owners = [i for i, s in enumerate(samples) for _ in range(s.num_segments)]
        """[Q] the trajectory of each."""
        self._samples = samples
        self._firsts = np.cumsum([0, *(sample.num_segments for sample in samples)]).tolist()

    def of(self, chosen: Sequence[int]) -> list[int]:
        """Return the numbers of the segments of the chosen trajectories, in order."""
        return [q for i in chosen for q in range(self._firsts[i], self._firsts[i + 1])]

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
