"""Intervals and tests for evaluation scores, as pure functions.

`summary.py` asks for intervals of means, `comparison.py` for differences and tests, `table` for
means over seeds. All resampling is seeded, so the same numbers give the same interval.

Dimension key: S = seeds, N = questions, R = resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
LEVEL = 0.95
SEED = 0
MAX_DRAWS = 1 << 22
"""Most random draws held in memory at one time."""
MAX_FLIPPED = 16
"""Most differences of an exact sign-flip test: it looks at 2^16 patterns."""


def interval_record(method: str) -> dict[str, Any]:
    """Return what JSON files say of the intervals in them."""
    return {"method": method, "level": LEVEL, "resamples": RESAMPLES, "seed": SEED}


@dataclass(frozen=True)
class Estimate:
    """A mean and the interval around it."""

    mean: float
    low: float
    high: float


def bootstrap_mean(
    values_N: Sequence[float], *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = SEED
) -> Estimate:
    """Estimate a mean, with the percentile bootstrap interval over questions.

    Args:
        values_N: [N] one value per question.
        resamples: R, how often N values are drawn with replacement.
        level: share of the resampled means inside the interval, between 0 and 1.
        seed: of the draws.

    Returns:
        The mean and the interval; of no width when every value is equal.

    Raises:
        ValueError: there is no value, or one is not finite.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3.
    """
    values = np.asarray(values_N, dtype=np.float64)
    if values.size == 0:
        raise ValueError("values_N is empty; an interval needs at least one question")
    if not np.isfinite(values).all():
        raise ValueError("values_N holds a value that is not finite; a score is a number")
    mean = float(values.mean())
    if (values == values[0]).all():
        return Estimate(float(values[0]), float(values[0]), float(values[0]))
    rng = np.random.default_rng(seed)
    means_R = np.empty(resamples)
    rows = max(1, MAX_DRAWS // values.size)
    for start in range(0, resamples, rows):
        part = means_R[start : start + rows]
        drawn = rng.integers(0, values.size, size=(part.size, values.size))
        part[:] = values[drawn].mean(axis=1)
    return percentile_interval(mean, means_R, level)


def crossed_means(
    scores_SN: npt.NDArray[np.float64],
    drawn_RS: npt.NDArray[np.int64],
    rng: np.random.Generator,
) -> npt.NDArray[np.float64]:
    """Return [R] means over drawn seeds, each resample with one draw of questions for all seeds.

    All seeds answer the same questions, so what makes a question hard does not average out over
    seeds. Drawn anew for each seed, questions would seem to be S times as many.

    Args:
        scores_SN: [S, N] a question in the same column for every seed; NaN where it failed.
        drawn_RS: [R, S] indices of the seeds of each resample.
        rng: draws the questions: with equal state and N, the same ones for other scores.

    Source: Owen, The pigeonhole bootstrap, Annals of Applied Statistics 1 (2007).
    """
    answered_SN = np.isfinite(scores_SN)
    known_SN = np.where(answered_SN, scores_SN, 0.0)
    own_S = known_SN.sum(axis=1) / answered_SN.sum(axis=1)
    means_R = np.empty(len(drawn_RS))
    rows = max(1, MAX_DRAWS // scores_SN.shape[1])
    for start in range(0, len(drawn_RS), rows):
        drawn = drawn_RS[start : start + rows]
        counts_RN = _question_counts(len(drawn), scores_SN.shape[1], rng)
        answered_RS = counts_RN @ answered_SN.T
        # Without an answered question among the drawn ones, a seed counts with all of its own.
        means_RS = np.tile(own_S, (len(drawn), 1))
        np.divide(counts_RN @ known_SN.T, answered_RS, out=means_RS, where=answered_RS > 0)
        means_R[start : start + rows] = np.take_along_axis(means_RS, drawn, axis=1).mean(axis=1)
    return means_R


def _question_counts(
    resamples: int, questions: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return [R, N] how often each question is drawn."""
    drawn = rng.integers(0, questions, size=(resamples, questions))
    places = drawn + questions * np.arange(resamples)[:, None]
    counts = np.bincount(places.ravel(), minlength=resamples * questions)
    return counts.reshape(resamples, questions).astype(np.float64)


def percentile_interval(mean: float, means_R: npt.NDArray[np.float64], level: float) -> Estimate:
    """Return a mean and the interval that holds a share `level` of its [R] resampled means."""
    tail = (1.0 - level) / 2
    low, high = np.quantile(means_R, [tail, 1.0 - tail])
    # By rounding, or with very few resamples, the quantiles may miss the mean they are around.
    return Estimate(mean, min(float(low), mean), max(float(high), mean))


def paired_difference(
    first_N: Sequence[float], second_N: Sequence[float], *, resamples: int = RESAMPLES
) -> Estimate:
    """Estimate the mean of second minus first over the same questions.

    Questions are drawn, each with both of its values, so that what makes a question hard cancels.

    Args:
        first_N: [N] one value per question.
        second_N: [N] the other value of the same questions, in the same order.
        resamples: as in `bootstrap_mean`.

    Raises:
        ValueError: the lengths differ, or there is no value.
    """
    if len(first_N) != len(second_N):
        raise ValueError(
            f"first_N has {len(first_N)} values and second_N {len(second_N)}; give both values of "
            "every question"
        )
    differences = np.asarray(second_N, dtype=np.float64) - np.asarray(first_N, dtype=np.float64)
    return bootstrap_mean(differences.tolist(), resamples=resamples)


def pass_at(k: int, passed: int, attempts: int) -> float:
    """Return the chance that at least one of k attempts passes, without bias.

    Args:
        k: attempts that are drawn without replacement, at most `attempts`.
        passed: attempts that passed.
        attempts: attempts that were made.

    Source: arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)


def pass_all(k: int, passed: int, attempts: int) -> float:
    """Return the chance that each of k attempts passes (pass^k), without bias.

    Args:
        k: as in `pass_at`.
        passed: as in `pass_at`.
        attempts: as in `pass_at`.

    Source: tau-bench, arXiv:2406.12045, section 4.
    """
    return math.comb(passed, k) / math.comb(attempts, k)


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of the exact McNemar test.

    Under the null hypothesis each question that only one of the two got right is a fair coin.

    Returns:
        Probability of a split at least this uneven; 1.0 without any such question.

    Raises:
        ValueError: a count is negative.

    Source: McNemar, Psychometrika 12 (1947); the exact form is the binomial sign test.
    """
    if only_first < 0 or only_second < 0:
        raise ValueError(f"counts ({only_first}, {only_second}) must not be negative")
    n, fewer = only_first + only_second, min(only_first, only_second)
    # Integers, since 2**n is beyond a float from n = 1024 on; int / int rounds once.
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**n)


def sign_flip_exact(differences_S: Sequence[float]) -> float:
    """Return the two-sided p-value of the exact sign-flip test of a mean difference of 0.

    Under the null hypothesis the difference of each pair is as likely as its negative, so all 2^S
    patterns of signs are equally likely.

    Args:
        differences_S: [S] one difference a pair, such as of two methods with the same seed.

    Returns:
        Share of the patterns whose mean is at least as far from 0; at least 2^(1-S) where no
        difference is 0.

    Raises:
        ValueError: there is no difference, or there are more than `MAX_FLIPPED`.

    Source: Fisher, The Design of Experiments (1935), section 21.
    """
    differences = np.asarray(differences_S, dtype=np.float64)
    if not 0 < differences.size <= MAX_FLIPPED:
        raise ValueError(
            f"differences_S has {differences.size} values; the exact test takes 1 to {MAX_FLIPPED}"
        )
    patterns = np.arange(1 << differences.size)[:, None] >> np.arange(differences.size) & 1
    sums = (1 - 2 * patterns) @ differences
    # By rounding, the same sum in another order may come out a little smaller.
    least = abs(float(differences.sum())) - 1e-9 * float(np.abs(differences).sum())
    return float(np.mean(np.abs(sums) >= least))


def least_sign_flip_p(num_seeds: int) -> float:
    """Return the smallest p-value that `sign_flip_exact` can give for so many differences.

    All differences of one sign are the most extreme outcome. Of the 2^S patterns, only it and its
    negative are as far from 0: 2 / 2^S = 2^(1-S).
    """
    return 2.0 ** (1 - num_seeds)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number, in the same order.

    Each is at most the level a only where Holm's step-down procedure rejects at a.

    Args:
        p_values: of all tests of one family.

    Source: Holm, Scandinavian Journal of Statistics 6 (1979).
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
