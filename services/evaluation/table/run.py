"""The numbers of a results table: means over seeds, their intervals, what they say.

cli/evaluation/table.py --answers of every run--> here --> report.py. Pure functions: the same
answers give the same numbers.

Dimension key: S = seeds, N = questions of one set, R = resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from agent_r1.evaluation.statistics import (
    LEVEL,
    RESAMPLES,
    SEED,
    Estimate,
    crossed_means,
    percentile_interval,
)
from agent_r1.evaluation.table.config import Part

NEVER_RIGHT = 0.01
"""A set on which every row has a lower mean is said to tell nothing."""
MASKS = ("learner.advantage_mask", "learner.loss_mask")
Scores = Sequence[float | None]
"""[N] one value a question, in the order of the set's file; None where it failed."""
Means = npt.NDArray[np.float64]
"""[R] one mean a resample."""


@dataclass(frozen=True)
class SeedScores:
    """What one run, or one baseline, answered."""

    seed: int | None
    """None for a baseline: nothing in it is drawn."""
    scores: Mapping[str, Scores]
    """The table's measure of every question, by set."""
    f1: Mapping[str, float] = field(default_factory=dict)
    """Mean F1 of the same questions, by set; of none where the task has no F1."""
    calls: Mapping[str, float] = field(default_factory=dict)
    """Calls that a tool answered, mean over the same questions, by set."""
    failed: Mapping[str, int] = field(default_factory=dict)
    """Questions that failed and count in no mean, by set."""
    wall_s: float | None = None
    """Seconds the run took."""
    curve: Sequence[float] = ()
    """Mean measure of the trajectories of each training step."""
    tokens: Sequence[int] = ()
    """Tokens sampled for each training step."""
    components: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Mean of every other reward component at each training step that has one."""


@dataclass(frozen=True)
class Row:
    """One method."""

    method: str
    title: str
    table: Part
    runs: Sequence[SeedScores]
    """One a seed; empty where it has not been run."""
    baseline: bool = False
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    """What sets it apart, by dotted key."""


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
    """The cells of a row."""

    sets: Mapping[str, Estimate]
    average: Estimate
    """Over the sets whose kind of question was trained on."""
    resampled: Mapping[str, Means] = field(repr=False)
    """The resampled means of each set; resample i has the same questions in every row."""
    resampled_average: Means = field(repr=False)

    def above(self, other: RowEstimates, name: str | None = None) -> Estimate:
        """Estimate by how much this row is above another one, question by question.

        Args:
            other: of the same table.
            name: the set; None takes the average.
        """
        if name is None:
            mean = self.average.mean - other.average.mean
            apart_R = self.resampled_average - other.resampled_average
        else:
            mean = self.sets[name].mean - other.sets[name].mean
            apart_R = self.resampled[name] - other.resampled[name]
        return percentile_interval(mean, apart_R, LEVEL)


def estimate_row(
    row: Row, sets: Sequence[str], in_domain: Sequence[str] = ()
) -> RowEstimates | None:
    """Estimate the mean score of a row; None where it has not been run."""
    if not row.runs:
        return None
    scores = {name: score_array([run.scores[name] for run in row.runs]) for name in sets}
    means = {name: _mean(of_set) for name, of_set in scores.items()}
    drawn = resampled_means(list(scores.values()), [run.seed for run in row.runs])
    means_R = dict(zip(sets, drawn, strict=True))
    averaged = in_domain or sets
    averages_R = np.mean([means_R[name] for name in averaged], axis=0)
    average = float(np.mean([means[name] for name in averaged]))
    return RowEstimates(
        sets={name: percentile_interval(means[name], means_R[name], LEVEL) for name in sets},
        average=percentile_interval(average, averages_R, LEVEL),
        resampled=means_R,
        resampled_average=averages_R,
    )


def mean_curve(runs: Sequence[SeedScores]) -> list[float]:
    """Return the mean over seeds at every step, as far as all of them have one."""
    steps = min((len(run.curve) for run in runs), default=0)
    return [float(np.mean([run.curve[step] for run in runs])) for step in range(steps)]


Estimated = Sequence[tuple[Row, RowEstimates | None]]


def goal_sentences(rows: Estimated, in_domain: Sequence[str]) -> list[str]:
    """Say what the numbers show, one sentence a goal."""
    return [*_baseline_goal(rows, in_domain), *_mask_goals(rows), *_best(rows)]


def _baseline_goal(rows: Estimated, in_domain: Sequence[str]) -> list[str]:
    baselines = [(row, found) for row, found in rows if row.baseline and found is not None]
    trained = [
        (row, found)
        for row, found in rows
        if row.table == "methods" and not row.baseline and found is not None
    ]
    if not baselines or not trained:
        return []
    question = (
        f"Does every trained row beat {listed([row.title for row, _ in baselines])} on "
        f"{listed(in_domain)}, by a difference whose interval is above 0? "
    )
    exceptions = [
        f"{row.title} against {other.title} on {name} ({share(found.sets[name].mean)} and "
        f"{share(least.sets[name].mean)}, difference {signed(above)})"
        for row, found in trained
        for other, least in baselines
        for name in in_domain
        if (above := found.above(least, name)).low <= 0
    ]
    missing = [row.title for row, found in rows if row.table == "methods" and found is None]
    note = f" Not run: {', '.join(missing)}." if missing else ""
    answer = "Yes." if not exceptions else f"No: {'; '.join(exceptions)}."
    return [question + answer + note]


def _mask_goals(rows: Estimated) -> list[str]:
    """Compare every row without a mask with the one that differs in nothing but the masks."""
    sentences: list[str] = []
    ablation = [(row, found) for row, found in rows if row.table == "ablation"]
    for row, found in ablation:
        if all(row.settings.get(mask, True) for mask in MASKS):
            continue
        full = next(
            (
                (other, estimates)
                for other, estimates in ablation
                if all(other.settings.get(mask, True) for mask in MASKS)
                and _without_masks(other) == _without_masks(row)
            ),
            None,
        )
        if full is None or found is None or full[1] is None:
            continue
        difference = full[1].above(found)
        apart = difference.low > 0 or difference.high < 0
        sentences.append(
            f"{full[0].title} against {row.title}, average: {full[1].average.mean:.3f} against "
            f"{found.average.mean:.3f}, difference {signed(difference)}; the interval "
            f"{'does not hold' if apart else 'holds'} 0."
        )
    return sentences


def _without_masks(row: Row) -> dict[str, JsonValue]:
    return {key: value for key, value in row.settings.items() if key not in MASKS}


def _best(rows: Estimated) -> list[str]:
    """Name the best row where it is above every other one, else those that may be it."""
    found = [(row, e) for row, e in rows if row.table == "methods" and e is not None]
    if len(found) < 2:
        return []
    best_row, best = max(found, key=lambda pair: pair[1].average.mean)
    above = [(row, best.above(e)) for row, e in found if row is not best_row]
    close = [row for row, difference in above if difference.low <= 0]
    if not close:
        nearest, least = min(above, key=lambda pair: pair[1].mean)
        return [
            f"The highest average is that of {best_row.title}, {interval(best.average)}; the "
            "interval of its difference from every other row is above 0. From the next one, "
            f"{nearest.title}, it differs by {signed(least)}."
        ]
    among = [(row, e.average.mean) for row, e in found if row is best_row or row in close]
    means = [mean for _, mean in among]
    return [
        f"No row is clearly the best: the averages of {', '.join(row.title for row, _ in among)} "
        f"are from {share(min(means))} to {share(max(means))}, and their differences from the "
        "highest have intervals that hold 0."
    ]


def domain_notes(
    rows: Estimated, sets: Sequence[str], in_domain: Sequence[str], *, named: bool = False
) -> list[str]:
    """Say what the average is over, and what no row could score on.

    Args:
        rows: of both tables.
        sets: all of them.
        in_domain: those of the average.
        named: the table file names them; else their kinds of question were trained on.
    """
    if not in_domain or set(sets) <= set(in_domain):
        return []
    reason = "" if named else ", whose kinds of question were trained on"
    notes = [f"The average is over {listed(in_domain)}{reason}."]
    for name in sets:
        means = [found.sets[name].mean for _, found in rows if found is not None]
        if name not in in_domain and means and max(means) < NEVER_RIGHT:
            notes.append(
                f"No row answers more than {share(max(means))} of {name}, so that column does not "
                "tell methods apart."
            )
    return notes


def listed(names: Sequence[str]) -> str:
    """Render names as `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def interval(estimate: Estimate) -> str:
    """Render an estimate as `.954 [.930, .972]`."""
    return f"{share(estimate.mean)} [{share(estimate.low)}, {share(estimate.high)}]"


def signed(difference: Estimate) -> str:
    """Render a difference as `+0.020 [-0.004, +0.043]`."""
    return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"


def share(value: float) -> str:
    """Render a number from 0 to 1 with three digits, as the paper does: `.954`."""
    text = f"{value:.3f}"
    return text[1:] if text.startswith("0.") else text
