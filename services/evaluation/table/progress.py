"""How fast runs learn: report.py --curves of training steps--> here --> a table of the report.

Pure functions. A curve has the mean measure of the training rollouts of each step, so it costs
nothing beyond training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from agent_r1.evaluation.table.run import SeedScores

WINDOW = 10
"""Steps that are averaged before a curve is compared with the threshold: one step has few
questions, and a lucky one would reach it too early."""


@dataclass(frozen=True)
class LearningProgress:
    """What the curves of one method say, over its seeds."""

    area: float
    """Mean over the seeds of the area under the curve, from 0 to 1."""
    reached: int | None
    """Runs that reached the threshold; None without one, as are the next two."""
    tokens: list[int | None] | None
    """Sampled tokens to the threshold, one a run; None where it was never reached (censored)."""
    median_tokens: float | None
    """Their median, in which a run that never reached it took longer than any that did; None where
    that leaves it unknown."""
    runs: int
    """Runs that have a curve."""


def area_under(curve: Sequence[float]) -> float:
    """Return the area under a curve over its steps, divided by their number: from 0 to 1."""
    return fmean(curve)


def tokens_to(run: SeedScores, threshold: float) -> int | None:
    """Return how many tokens a run had sampled when it reached the threshold; None if never.

    It is reached at the end of the first `WINDOW` steps in a row whose mean is at least as high.
    """
    for end in range(WINDOW, len(run.curve) + 1):
        if fmean(run.curve[end - WINDOW : end]) >= threshold:
            return sum(run.tokens[:end])
    return None


def measure_progress(
    runs: Sequence[SeedScores], threshold: float | None
) -> LearningProgress | None:
    """Summarise the curves of one method; None where no run has one."""
    measured = [run for run in runs if run.curve]
    if not measured:
        return None
    area = fmean(area_under(run.curve) for run in measured)
    if threshold is None:
        return LearningProgress(area, None, None, None, len(measured))
    tokens = [tokens_to(run, threshold) for run in measured]
    middle = median(math.inf if count is None else count for count in tokens)
    return LearningProgress(
        area,
        sum(count is not None for count in tokens),
        tokens,
        None if math.isinf(middle) else middle,
        len(measured),
    )
