"""Two result files side by side: paired differences over the questions that both answered.

Reads lines of `answers.py`; gives the numbers and lines that `agent-r1 compare` shows and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_r1.evaluation.answers import Answer, read_answers
from agent_r1.evaluation.statistics import (
    LEVEL,
    RESAMPLES,
    SEED,
    Estimate,
    mcnemar_exact,
    paired_difference,
)

MEASURES = ("em", "f1", "substring_match", "reward", "num_calls")
Pair = tuple[Answer, Answer]


@dataclass(frozen=True)
class MeasureComparison:
    """One number of two result files, over the same questions."""

    n: int
    """Questions that have the number in both files."""
    a: float
    """Mean of the first file."""
    b: float
    """Mean of the second file."""
    difference: Estimate
    """Mean of second minus first, with its interval."""


@dataclass(frozen=True)
class McNemar:
    """The exact test on the questions that only one of the two got right."""

    only_a: int
    only_b: int
    p: float
    """Two-sided."""


@dataclass(frozen=True)
class GroupComparison:
    """Two result files over some questions."""

    n: int
    """Questions that both files answered."""
    measures: dict[str, MeasureComparison]
    """By name; without those that no question has in both files."""
    mcnemar: McNemar | None
    """None where exact match is not scored."""

    def record(self) -> dict[str, Any]:
        """Return the numbers as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """Two result files, over all common questions and per set."""

    a: Path
    b: Path
    only_a: int
    """Questions that only the first file has."""
    only_b: int
    failed: int
    """Common questions that failed in a file, and count nowhere else."""
    overall: GroupComparison
    sets: dict[str, GroupComparison]

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "only_in_a": self.only_a,
            "only_in_b": self.only_b,
            "failed": self.failed,
            "interval": {
                "method": "percentile bootstrap over questions of the paired difference",
                "level": LEVEL,
                "resamples": RESAMPLES,
                "seed": SEED,
            },
            "all": self.overall.record(),
            "sets": {name: group.record() for name, group in self.sets.items()},
        }


def compare_files(a: Path, b: Path) -> Comparison:
    """Compare two result files on the questions both have.

    Raises:
        ValueError: a file is unreadable or a line malformed (file and line are named), the files
            have no scored question in common, or one question has two texts.
    """
    first = {answer.key: answer for answer in read_answers(a)}
    second = {answer.key: answer for answer in read_answers(b)}
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ValueError(
            f"{a} and {b} have no question in common (sets {_sets(first.values())} and "
            f"{_sets(second.values())}); compare two evaluations of the same sets"
        )
    for key in common:
        if first[key].question != second[key].question:
            raise ValueError(
                f"question {key[1]!r} of set {key[0]!r} is another one in {a} than in {b}; compare "
                "two evaluations of the same data"
            )
    pairs = [(first[key], second[key]) for key in common]
    scored = [pair for pair in pairs if not (pair[0].failed or pair[1].failed)]
    if not scored:
        raise ValueError(
            f"each of the {len(common)} questions that {a} and {b} have in common failed in one of "
            "them; run the same `agent-r1 evaluate` again, which asks failed questions again"
        )
    by_set: dict[str, list[Pair]] = {}
    for pair in scored:
        by_set.setdefault(pair[0].set, []).append(pair)
    return Comparison(
        a=a,
        b=b,
        only_a=len(first) - len(common),
        only_b=len(second) - len(common),
        failed=len(pairs) - len(scored),
        overall=compare_pairs(scored),
        sets={name: compare_pairs(members) for name, members in by_set.items()},
    )


def _sets(answers: Any) -> str:
    return ", ".join(sorted({answer.set for answer in answers}))


def compare_pairs(pairs: Sequence[Pair]) -> GroupComparison:
    """Compare answers pairwise.

    Args:
        pairs: two scored answers to each question, at least one question.
    """
    measures: dict[str, MeasureComparison] = {}
    for name in MEASURES:
        values = [
            (float(x), float(y))
            for x, y in ((getattr(a, name), getattr(b, name)) for a, b in pairs)
            if x is not None and y is not None
        ]
        if values:
            xs, ys = [x for x, _ in values], [y for _, y in values]
            measures[name] = MeasureComparison(
                n=len(values),
                a=sum(xs) / len(xs),
                b=sum(ys) / len(ys),
                difference=paired_difference(xs, ys),
            )
    return GroupComparison(n=len(pairs), measures=measures, mcnemar=_mcnemar(pairs))


def _mcnemar(pairs: Sequence[Pair]) -> McNemar | None:
    right = [(a.em == 1.0, b.em == 1.0) for a, b in pairs if None not in (a.em, b.em)]
    if not right:
        return None
    only_a = sum(a and not b for a, b in right)
    only_b = sum(b and not a for a, b in right)
    return McNemar(only_a, only_b, mcnemar_exact(only_a, only_b))


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return a comparison as a table in lines of text."""
    groups = dict(comparison.sets)
    if len(groups) > 1:
        groups["all sets"] = comparison.overall
    width = max(12, *(len(name) for name in groups))
    head = f"{'set':<{width}}  {'measure':<15} {'n':>6} {'A':>8} {'B':>8} {'B - A':>8}"
    lines = [
        f"A: {comparison.a}",
        f"B: {comparison.b}",
        f"{head}  {'95 % interval':<19} McNemar",
    ]
    for name, group in groups.items():
        for measure, values in group.measures.items():
            test = ""
            if measure == "em" and group.mcnemar is not None:
                m = group.mcnemar
                test = f"p = {m.p:.4g} (only A {m.only_a}, only B {m.only_b})"
            d = values.difference
            row = (
                f"{name:<{width}}  {measure:<15} {values.n:>6} {values.a:>8.3f} {values.b:>8.3f} "
                f"{d.mean:>+8.3f}  [{d.low:+.3f}, {d.high:+.3f}]    {test}"
            )
            lines.append(row.rstrip())
    left_out = {
        "only in A": comparison.only_a,
        "only in B": comparison.only_b,
        "failed": comparison.failed,
    }
    if any(left_out.values()):
        shown = ", ".join(f"{count} {name}" for name, count in left_out.items() if count)
        lines.append(f"left out: {shown}")
    return lines
