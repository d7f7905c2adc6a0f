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
    MAX_DRAWS,
    RESAMPLES,
    SEED,
    Estimate,
    percentile_interval,
)
from agent_r1.evaluation.table.config import Part

NEVER_RIGHT = 0.01
"""A set on which every row has a lower mean is said to tell nothing."""
MASKS = ("learner.advantage_mask", "learner.loss_mask")


@dataclass(frozen=True)
class SeedScores:
    """What one run, or one baseline, answered."""

    seed: int | None
    """None for a baseline: nothing in it is drawn."""
    scores: Mapping[str, Sequence[float]]
    """[N] the table's measure of every question that was scored, by set."""
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
    values: Sequence[Sequence[Sequence[float]]], *, level: float = LEVEL, seed: int = SEED
) -> Estimate:
    """Estimate a mean over seeds and sets, with the interval of a two-stage bootstrap.

    Each resample draws S seeds with replacement, and within each drawn seed, from every set, as
    many questions as it has. A seed weighs the same as another, and so does a set.

    Args:
        values: per set, per seed, one value a question; every set has the same S seeds.
        level: share of the resampled means inside the interval, between 0 and 1.
        seed: of the draws.

    Returns:
        The mean and the percentile interval around it.

    Raises:
        ValueError: there is no set, no seed or no question, or the sets differ in their seeds.

    Source: Davison and Hinkley, Bootstrap Methods and their Application (1997), section 3.8.
    """
    num_seeds = {len(of_set) for of_set in values}
    if len(num_seeds) != 1 or num_seeds == {0}:
        raise ValueError(f"the sets have {sorted(num_seeds)} seeds; give every set the same, >= 1")
    if not all(len(answers) for of_set in values for answers in of_set):
        raise ValueError("a seed has no question of a set; an interval needs at least one")
    mean = float(np.mean([np.mean([np.mean(a) for a in of_set]) for of_set in values]))
    rng = np.random.default_rng(seed)
    drawn_RS = rng.integers(0, num_seeds.pop(), size=(RESAMPLES, len(values[0])))
    means_R = np.mean([_resampled(of_set, drawn_RS, rng) for of_set in values], axis=0)
    return percentile_interval(mean, means_R, level)


def _resampled(
    values_SN: Sequence[Sequence[float]], drawn_RS: npt.NDArray[np.int64], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return [R] means of one set, over the drawn seeds and questions drawn within each."""
    sizes = np.array([len(answers) for answers in values_SN])
    padded = np.zeros((len(values_SN), sizes.max()))
    for row, answers in zip(padded, values_SN, strict=True):
        row[: len(answers)] = answers
    means_R = np.zeros(len(drawn_RS))
    rows = max(1, MAX_DRAWS // int(sizes.max()))
    for start in range(0, len(drawn_RS), rows):
        part = slice(start, start + rows)
        for seed_R in drawn_RS[part].T:
            size_R = sizes[seed_R][:, None]
            index = (rng.random((len(seed_R), padded.shape[1])) * size_R).astype(np.intp)
            # A seed in which questions failed has fewer of them.
            counted = np.arange(padded.shape[1]) < size_R
            answers = np.where(counted, padded[seed_R[:, None], index], 0.0)
            means_R[part] += answers.sum(axis=1) / size_R[:, 0]
    return means_R / drawn_RS.shape[1]


@dataclass(frozen=True)
class RowEstimates:
    """The cells of a row."""

    sets: Mapping[str, Estimate]
    average: Estimate
    """Over the sets whose kind of question was trained on."""


def estimate_row(
    row: Row, sets: Sequence[str], in_domain: Sequence[str] = ()
) -> RowEstimates | None:
    """Estimate the mean score of a row; None where it has not been run."""
    if not row.runs:
        return None
    values = {name: [list(run.scores[name]) for run in row.runs] for name in sets}
    return RowEstimates(
        sets={name: bootstrap_seeds([values[name]]) for name in sets},
        average=bootstrap_seeds([values[name] for name in in_domain or sets]),
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
        f"{listed(in_domain)}, with intervals that do not overlap? "
    )
    exceptions = [
        f"{row.title} against {other.title} on {name} ({interval(found.sets[name])} and "
        f"{interval(least.sets[name])})"
        for row, found in trained
        for other, least in baselines
        for name in in_domain
        if found.sets[name].low <= least.sets[name].high
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
        with_masks, without = full[1].average, found.average
        apart = with_masks.low > without.high or without.low > with_masks.high
        sentences.append(
            f"{full[0].title} against {row.title}, average: "
            f"{with_masks.mean:.3f} against {without.mean:.3f}, difference "
            f"{with_masks.mean - without.mean:+.3f}; the intervals "
            f"{'do not overlap' if apart else 'overlap'}."
        )
    return sentences


def _without_masks(row: Row) -> dict[str, JsonValue]:
    return {key: value for key, value in row.settings.items() if key not in MASKS}


def _best(rows: Estimated) -> list[str]:
    """Name the best row where its interval is above every other's, else those that may be it."""
    found = [(row, e.average) for row, e in rows if row.table == "methods" and e is not None]
    if len(found) < 2:
        return []
    best_row, best = max(found, key=lambda pair: pair[1].mean)
    close = [(row, average) for row, average in found if average.high >= best.low]
    if len(close) == 1:
        return [
            f"The highest average is that of {best_row.title}, {interval(best)}; no other interval "
            "reaches it."
        ]
    means = [average.mean for _, average in close]
    return [
        f"No row is clearly the best: the averages of {', '.join(row.title for row, _ in close)} "
        f"are from {share(min(means))} to {share(max(means))}, and their intervals overlap."
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


def share(value: float) -> str:
    """Render a number from 0 to 1 with three digits, as the paper does: `.954`."""
    text = f"{value:.3f}"
    return text[1:] if text.startswith("0.") else text
