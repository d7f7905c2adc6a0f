"""The numbers of a table's report: means over seeds, their intervals, how fast runs learn.

Cells --> here --> table_report.py and findings.py. Pure functions: the same cells give the same
numbers.

Dimension key: S = seeds, N = questions of one set, R = resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from agent_r1.evaluation.experiments.cell import TableCell
from agent_r1.evaluation.experiments.config import Part
from agent_r1.evaluation.statistics import (
    LEVEL,
    RESAMPLES,
    SEED,
    Estimate,
    crossed_means,
    percentile_interval,
)

WINDOW = 10
"""Steps that are averaged before a curve is compared with the threshold: one step has few
questions, and a lucky one would reach it too early."""
Scores = Sequence[float | None]
"""[N] one value a question, in the order of the set's file; None where it failed."""
Means = npt.NDArray[np.float64]
"""[R] one mean a resample."""


Run = TypeVar("Run")


@dataclass(frozen=True)
class Row(Generic[Run]):
    """One method: of a plan with the runs that it asks for, of a report with their cells."""

    name: str
    title: str
    table: Part
    runs: Sequence[Run]
    """One a seed; in a report, empty where it has not been run."""
    baseline: bool = False
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    """Settings that set it apart, by dotted key."""


def bootstrap_seeds(
    values: Sequence[Sequence[Scores]], *, level: float = LEVEL, seed: int = SEED
) -> Estimate:
    """Estimate a mean over seeds and sets, with a bootstrap interval over seeds and questions.

    The interval is about other questions of the same kind, answered by runs with other seeds. Each
    resample draws S seeds with replacement and, once for all seeds, as many questions of every set
    as it has: all seeds answer the same questions. A seed weighs the same as another, and so does
    a set. One seed tells nothing of others: its interval is about other questions only.

    Args:
        values: per set, per seed, one value a question; every set has the same S seeds.
        level: share of the resampled means inside the interval, between 0 and 1.
        seed: of the draws.

    Returns:
        The mean and the percentile interval around it.

    Raises:
        ValueError: there is no set, no seed or no question, or the sets differ in their seeds.

    Source: Owen, The pigeonhole bootstrap, Annals of Applied Statistics 1 (2007).
    """
    num_seeds = {len(of_set) for of_set in values}
    if len(num_seeds) != 1 or num_seeds == {0}:
        raise ValueError(f"the sets have {sorted(num_seeds)} seeds; give every set the same, >= 1")
    scores = [score_array(of_set) for of_set in values]
    mean = float(np.mean([_mean(of_set) for of_set in scores]))
    means_R = resampled_means(scores, range(num_seeds.pop()), seed=seed)
    return percentile_interval(mean, np.mean(means_R, axis=0), level)


def score_array(values_S: Sequence[Scores]) -> npt.NDArray[np.float64]:
    """Return the scores of one set as [S, N]; NaN where a question failed.

    Raises:
        ValueError: a seed has no question.
    """
    if not all(any(value is not None for value in scores) for scores in values_S):
        raise ValueError("a seed has no question of a set; an interval needs at least one")
    # A run of an older version left out what failed, so its list is shorter.
    scores_SN = np.full((len(values_S), max(map(len, values_S))), np.nan)
    for row, scores in zip(scores_SN, values_S, strict=True):
        row[: len(scores)] = [np.nan if value is None else value for value in scores]
    return scores_SN


def _mean(scores_SN: npt.NDArray[np.float64]) -> float:
    return float(np.mean(np.nanmean(scores_SN, axis=1)))


def resampled_means(
    scores: Sequence[npt.NDArray[np.float64]], seeds: Sequence[int | None], *, seed: int = SEED
) -> list[Means]:
    """Return the resampled means of each set.

    The draws depend on nothing but the place of a set, its number of questions and the seeds. So
    all rows of a table meet the same questions in each resample, and rows with the same seeds the
    same seeds: differences between rows are paired.

    Args:
        scores: [S, N] per set.
        seeds: S values of `run.seed`; None for a baseline.
        seed: of the draws.
    """
    names = [(name or 0) % 2**64 for name in seeds]  # seeds may be negative, and a key may not
    drawn_RS = np.random.default_rng([seed, 0, *names]).integers(
        0, len(names), size=(RESAMPLES, len(names))
    )
    return [
        crossed_means(of_set, drawn_RS, np.random.default_rng([seed, place, of_set.shape[1]]))
        for place, of_set in enumerate(scores, start=1)
    ]


@dataclass(frozen=True)
class RowEstimates:
    """The cells of a row: of each set, and of the average, whose name is None."""

    means: Mapping[str | None, float]
    resampled: Mapping[str | None, Means] = field(repr=False)
    """The resampled means; resample i has the same questions in every row."""

    def of(self, name: str | None = None) -> Estimate:
        """Return the mean score of a set, or of the average, with its interval."""
        return percentile_interval(self.means[name], self.resampled[name], LEVEL)

    def above(self, other: RowEstimates, name: str | None = None) -> Estimate:
        """Estimate by how much this row is above another one of its table, question by question."""
        apart_R = self.resampled[name] - other.resampled[name]
        return percentile_interval(self.means[name] - other.means[name], apart_R, LEVEL)


def estimate_row(
    row: Row[TableCell], sets: Sequence[str], averaged: Sequence[str] = ()
) -> RowEstimates | None:
    """Estimate the mean score of a row; None where it has not been run.

    Args:
        row: of a report.
        sets: all of them.
        averaged: those of the average; none: all.
    """
    if not row.runs:
        return None
    scores = [score_array([run.scores[name] for run in row.runs]) for name in sets]
    drawn = resampled_means(scores, [run.seed for run in row.runs])
    means: dict[str | None, float] = dict(zip(sets, map(_mean, scores), strict=True))
    means_R: dict[str | None, Means] = dict(zip(sets, drawn, strict=True))
    means[None] = float(np.mean([means[name] for name in averaged or sets]))
    means_R[None] = np.mean([means_R[name] for name in averaged or sets], axis=0)
    return RowEstimates(means, means_R)


def mean_curve(runs: Sequence[TableCell]) -> list[float]:
    """Return the mean over seeds at every step, as far as all of them have one."""
    steps = min((len(run.curve) for run in runs), default=0)
    return [float(np.mean([run.curve[step] for run in runs])) for step in range(steps)]


@dataclass(frozen=True)
class LearningProgress:
    """Progress of one method: its curves over its seeds."""

    area: float
    """Mean over the seeds of the area under the curve over the steps, divided by their number: from
    0 to 1."""
    reached: int | None
    """Runs that reached the threshold; None without one, as are the next two."""
    tokens: list[int | None] | None
    """Sampled tokens to the threshold, one a run; None where it was never reached (censored)."""
    median_tokens: float | None
    """Their median, in which a run that never reached it took longer than any that did; None where
    that leaves it unknown."""
    runs: int
    """Runs that have a curve."""


def tokens_to(run: TableCell, threshold: float) -> int | None:
    """Return how many tokens a run had sampled when it reached the threshold; None if never.

    It is reached at the end of the first `WINDOW` steps in a row whose mean is at least as high.
    """
    for end in range(WINDOW, len(run.curve) + 1):
        if fmean(run.curve[end - WINDOW : end]) >= threshold:
            return sum(run.tokens[:end])
    return None


def measure_progress(runs: Sequence[TableCell], threshold: float | None) -> LearningProgress | None:
    """Summarise the curves of one method; None where no run has one."""
    measured = [run for run in runs if run.curve]
    if not measured:
        return None
    area = fmean(fmean(run.curve) for run in measured)
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
