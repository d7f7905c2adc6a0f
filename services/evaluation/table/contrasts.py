"""Comparisons of two methods that were fixed before the first run.

report.py --scores of every seed--> here --differences, p-values--> report.py. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from agent_r1.evaluation.statistics import holm, sign_flip_exact
from agent_r1.evaluation.table.run import Scores, SeedScores


@dataclass(frozen=True)
class Contrast:
    """Two methods, compared over the seeds that both have."""

    first: str
    second: str
    of: str
    """The set, or `average`."""
    differences: list[float]
    """Mean score of second minus first, one a seed."""
    mean: float | None
    """Of the differences; None without any, as are the next two."""
    p: float | None
    """Of the exact sign-flip test, two-sided."""
    p_holm: float | None
    """Adjusted for the number of contrasts that have seeds."""


def seed_differences(
    first: Sequence[SeedScores], second: Sequence[SeedScores], sets: Sequence[str]
) -> list[float]:
    """Return the mean score of second minus first over some sets, by seed."""
    means = [
        {run.seed: fmean(_mean(run.scores[name]) for name in sets) for run in runs}
        for runs in (first, second)
    ]
    shared = [seed for seed in means[0] if seed in means[1]]
    return [means[1][seed] - means[0][seed] for seed in shared]


def _mean(scores: Scores) -> float:
    return fmean(score for score in scores if score is not None)


def judge_contrasts(pairs: Sequence[tuple[str, str, str, list[float]]]) -> list[Contrast]:
    """Test every contrast, and adjust the p-values for their number.

    Args:
        pairs: first, second, what is compared, and the differences by seed.
    """
    p_values = {i: sign_flip_exact(pair[3]) for i, pair in enumerate(pairs) if pair[3]}
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return [
        Contrast(
            first,
            second,
            of,
            differences,
            fmean(differences) if differences else None,
            p_values.get(i),
            adjusted.get(i),
        )
        for i, (first, second, of, differences) in enumerate(pairs)
    ]
