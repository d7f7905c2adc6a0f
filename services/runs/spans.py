"""Scores of steps: two spans --> whether a score fell from one to the other, or where it fell most.

falls.py says why. Pure. Dimension key: S = steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Span = tuple[int, int]
"""First and last step, both included."""

WIDTHS = (5, 10, 20, 40)
"""Lengths of the spans in which a fall is looked for, in steps."""
LEVEL = 0.95
MOST_CORRELATED = 0.9
"""Most that neighbouring steps are taken to resemble each other: a sheer drop looks like more."""


@dataclass(frozen=True)
class Change:
    """A score over two spans."""

    score: str
    before: Span
    after: Span
    means: tuple[float, float]
    """Means of the steps before and after."""
    low: float
    high: float
    """Interval of after minus before (Welch, over steps); wider where several were looked at, and
    where steps resemble their neighbours."""
    looks: int
    """How many were."""

    @property
    def mean(self) -> float:
        """After minus before."""
        return self.means[1] - self.means[0]

    @property
    def fell(self) -> bool:
        """Whether the interval lies below 0, by more than rounding."""
        return self.high < -1e-9


def compare_spans(
    score: str, steps_S: Floats, values_S: Floats, before: Span, after: Span, looks: int
) -> Change | None:
    """Compare a score in two spans; None where one has fewer than two steps that measured it.

    Args:
        score: its name.
        steps_S: [S] learner steps.
        values_S: [S] their mean score; NaN where it was not measured.
        before: a span.
        after: another one.
        looks: comparisons among which this one was chosen (Bonferroni).
    """
    known_S = np.isfinite(values_S)
    inside = [(steps_S >= span[0]) & (steps_S <= span[1]) & known_S for span in (before, after)]
    a, b = (values_S[mask] for mask in inside)
    if min(len(a), len(b)) < 2:
        return None
    errors = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    margin = float(_margin(errors[0], errors[1], len(a), len(b), looks))
    margin *= _widening(values_S[known_S])
    means = float(a.mean()), float(b.mean())
    change = means[1] - means[0]
    return Change(score, before, after, means, change - margin, change + margin, looks)


def _margin(error_a: Any, error_b: Any, size_a: int, size_b: int, looks: int) -> Any:
    """Return half the width of Welch's interval, for squared errors of two means of so many."""
    squared = error_a + error_b
    parts = error_a**2 / (size_a - 1) + error_b**2 / (size_b - 1)
    freedom = squared**2 / np.maximum(parts, np.finfo(float).tiny)
    share = 1 - (1 - LEVEL) / 2 / looks
    return t_quantile(share, np.maximum(freedom, 1.0)) * np.sqrt(squared)


def _widening(values_S: Floats) -> float:
    """Return how much wider an interval is for steps that resemble their neighbours (AR(1)).

    With correlation r, (1 + r) / (1 - r) steps tell as much as one of independent ones. That of
    their differences is (r - 1) / 2, which a fall or slow learning hardly moves. Half a standard
    error of r is taken off, so that chance alone seldom widens.
    """
    changes = np.diff(values_S)
    squares = float(changes @ changes)
    r = 1 + 2 * float(changes[1:] @ changes[:-1]) / squares if squares else 0.0
    r = min(max(r - (0.5 / max(len(changes), 1)) ** 0.5, 0.0), MOST_CORRELATED)
    return ((1 + r) / (1 - r)) ** 0.5


def find_fall(score: str, steps_S: Floats, values_S: Floats, scores: int = 1) -> Change | None:
    """Return the change whose interval lies lowest: the fall that is least likely chance.

    Its interval holds for all places and lengths that are looked at, and for all scores.

    Args:
        score: its name.
        steps_S: [S] learner steps, ascending.
        values_S: [S] their mean score; NaN where it was not measured.
        scores: among which the reader, or the page, chooses.
    """
    known_S = np.isfinite(values_S)
    places_S, known_values_S = steps_S[known_S].astype(int).tolist(), values_S[known_S]
    widths = [width for width in WIDTHS if 2 * width <= len(places_S)]
    widening = _widening(known_values_S)
    found: list[tuple[float, int, int, int]] = []
    for width in widths:
        windows = np.lib.stride_tricks.sliding_window_view(known_values_S, width)
        means, errors = windows.mean(axis=1), windows.var(axis=1, ddof=1) / width
        looks = scores * len(widths) * (len(means) - width)
        margins = _margin(errors[:-width], errors[width:], width, width, looks)
        highs = means[width:] - means[:-width] + margins * widening
        best = int(highs.argmin())
        found.append((float(highs[best]), best, width, looks))
    if not found:
        return None
    _, first, width, looks = min(found)
    spans = [(places_S[i], places_S[i + width - 1]) for i in (first, first + width)]
    return compare_spans(score, steps_S, values_S, spans[0], spans[1], looks)


def t_quantile(share: float, freedom: Any) -> Any:
    """Return the quantile of Student's t by its expansion around the normal one.

    Args:
        share: below the quantile.
        freedom: degrees of freedom, one number or an array.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.5.
    """
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))
