"""Why the score of a run fell: its folder --> spans, scores --> runs/spans.py, falls.py --> `Fall`.

Reads `metrics.jsonl`, and of the stored trajectories only the files of the two spans. fall_pages.py
shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from agent_r1.config.run import Config
from agent_r1.console.series import RunMetrics
from agent_r1.evaluation.statistics import Estimate, paired_difference
from agent_r1.learner.weights.canary import MEAN_DLOGP
from agent_r1.reward.components import ASKING
from agent_r1.runs.falls import FINE, Case, Explanation, explain
from agent_r1.runs.spans import Change, Floats, Span, compare_spans, find_fall
from agent_r1.runs.store import StoredFile, stored_files

REWARD = "reward"
FAILED = "failures/attempts"
OF_WEIGHTS = ("canary/dlogp_mean", "canary/floor", "logprob/abs_diff_mean", "policy/version")
MOST_FILES = 40
"""Most steps of a span whose trajectories are read, evenly spaced."""
MOST_CASES = 1500
"""Most trajectories of a span, as many of each step."""
DEFAULT_WIDTH = 10
"""Steps of a span of which only the first is chosen."""
FEWEST_TASKS = 5
"""Tasks on both sides from which their paired difference is shown."""
BORDER = 0.1
"""Share of both spans that is left out next to where a fall was found: it may have begun a little
earlier or later, and then a few trajectories would stand on the wrong side."""
DRIFT = 10.0
"""Growth of the difference of log-probabilities from which weights are taken to have changed."""
WARNED, DIFFER = "the canary warned", "log-probabilities differ"


@dataclass(frozen=True)
class Numbers:
    """What `metrics.jsonl` has of a run that is asked why it fell."""

    scores: dict[str, str]
    """Scores that it has measured, with the names of their metrics."""
    steps: Floats
    """[S] learner steps."""
    columns: dict[str, Floats]
    """[S] values of each metric that is needed; NaN where a step has not measured it."""

    @classmethod
    def of(cls, metrics: RunMetrics, config: Config | None) -> Numbers:
        """Copy them, so that others may read the run meanwhile."""
        components = [] if config is None else config.reward.measured()
        known = {REWARD: "reward/mean", **{name: f"reward/{name}" for name in components}}
        scores = {one: metric for one, metric in known.items() if metric in metrics.names}
        names = [*scores.values(), *OF_WEIGHTS, FAILED]
        return cls(scores, metrics.steps, {name: metrics.column(name) for name in names})


@dataclass(frozen=True)
class Fall:
    """What a score did, and what explains it."""

    changes: list[Change]
    """Every score over the spans that are shown; the chosen one first."""
    was_looked_for: bool
    """Whether the spans are those of the biggest fall; else the reader has chosen them."""
    explanation: Explanation | None
    """Of the chosen score; None without a fall, or without trajectories on both sides."""
    failed: Change | None
    """Failed attempts of a step, which have no score; None where they are not counted."""
    same_tasks: tuple[int, Estimate] | None
    """Tasks that stand on both sides, and how their score changed."""

    @property
    def change(self) -> Change:
        """The chosen score."""
        return self.changes[0]

    @property
    def fell(self) -> bool:
        """Whether more than chance is seen; otherwise nothing is named."""
        return self.change.fell

    @property
    def named(self) -> list[str]:
        """What explains the fall, the greatest part first, as "kind: name"."""
        parts = [] if self.explanation is None or not self.fell else self.explanation.parts
        return [f"{part.kind}: {part.name}" for part in parts if part.is_named]


def role_of(score: str, config: Config | None) -> str:
    """Say what a score is for a run: the sum, trained on, learned, the truth."""
    if config is None or score == REWARD:
        return "what is trained on" if score == REWARD else ""
    weight = config.reward.measured().get(score, 0.0)
    texts = [f"weight {weight:g}" if weight else "measured only"]
    texts += ["learned"] if score in ASKING else []
    texts += ["score of evaluations"] if score == config.evaluation.score else []
    return ", ".join(texts)


def read_fall(
    folder: Path, numbers: Numbers, config: Config | None, score: str, after: Span | None
) -> Fall | None:
    """Return what a score did and why; None before there are enough steps.

    Args:
        folder: of the run.
        numbers: of the run.
        config: of the run; None where it cannot be read.
        score: that is asked about; "": the score of evaluations if a component fell that is one,
            otherwise what fell most.
        after: span that is compared with as many steps before it; None: the biggest fall is looked
            for.

    Raises:
        ValueError: the run has not measured that score, or stored trajectories are damaged.
    """
    if score and score not in numbers.scores:
        known = ", ".join(numbers.scores) or "none"
        raise ValueError(f"{score!r} is no score of this run; choose one of {known}")
    change = _chosen(numbers, config, score, after)
    if change is None:
        return None
    others = (
        _compare(numbers, metric, change.before, change.after, change.looks, one)
        for one, metric in numbers.scores.items()
        if one != change.score
    )
    # Without a fall, there is nothing to explain.
    border = 0 if after else math.ceil(BORDER * (change.after[1] - change.after[0] + 1))
    cases = list(_cases(folder, numbers, config, change, border)) if change.fell else []
    return Fall(
        changes=[change, *filter(None, others)],
        was_looked_for=after is None,
        explanation=explain(cases, change.score),
        failed=_compare(numbers, FAILED, change.before, change.after, change.looks),
        same_tasks=_same_tasks(cases, change.score),
    )


def _compare(
    numbers: Numbers, metric: str, before: Span, after: Span, looks: int, name: str = ""
) -> Change | None:
    values = numbers.columns[metric]
    return compare_spans(name or metric, numbers.steps, values, before, after, looks)


def _chosen(
    numbers: Numbers, config: Config | None, score: str, after: Span | None
) -> Change | None:
    changes: list[Change | None] = []
    for one, metric in numbers.scores.items():
        if score not in ("", one):
            continue
        if after is None:
            values = numbers.columns[metric]
            changes.append(find_fall(one, numbers.steps, values, len(numbers.scores)))
        else:
            before = 2 * after[0] - after[1] - 1, after[0] - 1
            changes.append(_compare(numbers, metric, before, after, len(numbers.scores), one))
    found = {change.score: change for change in changes if change is not None}
    truth = found.get(config.evaluation.score) if config is not None else None
    if truth is not None and truth.score != REWARD and truth.fell:
        return truth
    return min(found.values(), key=_depth, default=None)


def _depth(change: Change) -> float:
    """Return how deep a fall is for its noise: the bound of its interval over its width."""
    return change.high / max(change.high - change.low, 1e-12)


def span_from(numbers: Numbers, first: int, last: int | None) -> Span:
    """Return the span that begins at a step; without an end it has DEFAULT_WIDTH steps.

    Raises:
        ValueError: it ends before it begins.
    """
    if last is not None and last < first:
        raise ValueError(f"the span ends at step {last}, before step {first}; choose a later end")
    newest = int(numbers.steps[-1]) if numbers.steps.size else first
    return first, min(first + DEFAULT_WIDTH - 1, max(newest, first)) if last is None else last


def _cases(
    folder: Path, numbers: Numbers, config: Config | None, change: Change, border: int
) -> Iterator[Case]:
    bad = _bad_weights(numbers, config, change.before)
    files = stored_files(folder)
    spans = (
        (change.before[0], change.before[1] - border),
        (change.after[0] + border, change.after[1]),
    )
    for is_after, (first, last) in enumerate(spans):
        own = [file for file in files if file.step is not None and first <= file.step <= last]
        some = own[:: math.ceil(len(own) / MOST_FILES) or 1]
        for file in some:
            yield from islice(_cases_of(file, bool(is_after), bad), MOST_CASES // len(some))


def _cases_of(file: StoredFile, is_after: bool, bad: dict[tuple[str, int], str]) -> Iterator[Case]:
    try:
        for row, record in enumerate(file.records()):
            if not record.get("trained", True):
                continue
            version = (record.get("policy_versions") or [-1])[-1]
            weights = bad.get(("version", version)) or bad.get(("step", record["step"]), FINE)
            yield Case(record, is_after, (file.path.name, row), weights)
    except FileNotFoundError:
        return  # the learner has removed it since


def _bad_weights(
    numbers: Numbers, config: Config | None, before: Span
) -> dict[tuple[str, int], str]:
    """Return what is wrong with weights, by version (the canary) or by step (what was trained)."""
    if config is None:
        return {}
    learner, dtype = config.learner, config.model.dtype
    readings, floors, drift, versions = (numbers.columns[name] for name in OF_WEIGHTS)
    bound = learner.canary_mean_dlogp or MEAN_DLOGP[dtype]
    factor = 0.0 if dtype == "float32" else learner.canary_fail_factor
    warned = readings > np.maximum(bound, factor * np.nan_to_num(floors))
    usual = drift[(numbers.steps >= before[0]) & (numbers.steps <= before[1]) & np.isfinite(drift)]
    limit = max(bound, DRIFT * float(np.median(usual))) if usual.size else math.inf
    found = {("step", int(step)): DIFFER for step in numbers.steps[drift > limit]}
    return found | {("version", int(v)): WARNED for v in versions[warned] if np.isfinite(v)}


def _same_tasks(cases: list[Case], score: str) -> tuple[int, Estimate] | None:
    sides: list[dict[str, list[float]]] = [{}, {}]
    for case in cases:
        if (value := case.score(score)) is not None:
            sides[case.is_after].setdefault(str(case.record["task_id"]), []).append(value)
    both = sorted(sides[0].keys() & sides[1].keys())
    if len(both) < FEWEST_TASKS:
        return None
    means = [[float(np.mean(side[task])) for task in both] for side in sides]
    return len(both), paired_difference(*means, resamples=2000)
