"""Two result files side by side: paired differences over the questions that both answered.

Reads lines of `answer_file.py`; gives the numbers and lines that `agent-r1 compare` shows and
writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from agent_r1.evaluation.answer_file import Answer, components_of, read_answers
from agent_r1.evaluation.statistics import (
    Estimate,
    interval_record,
    mcnemar_exact,
    paired_difference,
)

MEASURES = ("em", "f1", "substring_match", "reward", "num_calls")
"""Shown of every file; besides, the components that were measured, and calls of tools."""
BY_ANOTHER_NAME = ("exact_match", "f1", "substring_match")
"""Components that `MEASURES` has."""
CALLS = "calls/"
"""Beginning of a measure: the calls that a tool answered, whose name follows."""
FLIPS_SHOWN = 20
"""Most questions that are printed of those that one of the two answered better."""
QUESTION_CHARS = 60
METHOD = "percentile bootstrap over questions of the paired difference"
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
    failed_a: int
    """Common questions that failed in the first file; they count nowhere else."""
    failed_b: int
    measures: dict[str, MeasureComparison]
    """Measures by name, without those that no question has in both files."""
    mcnemar: McNemar | None
    """Test of exact match; None where that is not scored."""


@dataclass(frozen=True)
class Flip:
    """A question that one of the two answered better: right, where exact match is scored."""

    set: str
    id: str
    question: str
    better: Literal["A", "B"]
    measure: str
    """The score that says so: em, or reward where it is not scored."""
    a: float
    b: float


@dataclass(frozen=True)
class Comparison:
    """Two result files, over all common questions and per set."""

    a: Path
    b: Path
    only_a: int
    """Questions that only the first file has."""
    only_b: int
    components: Sequence[str]
    """Reward components that the configuration of either file measures."""
    failed: int
    """Common questions that failed in a file, and count nowhere else."""
    overall: GroupComparison
    sets: dict[str, GroupComparison]
    flips: Sequence[Flip]
    """Questions that one of the two answered better, by set and id."""

    def record(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "only_in_a": self.only_a,
            "only_in_b": self.only_b,
            "failed": self.failed,
            "interval": interval_record(METHOD),
            "all": asdict(self.overall),
            "sets": {name: asdict(group) for name, group in self.sets.items()},
            "flipped": [asdict(flip) for flip in self.flips],
        }


def compare_files(a: Path, b: Path) -> Comparison:
    """Compare two result files on the questions both have.

    Raises:
        ValueError: a file is unreadable or a line malformed (file and line are named), the files
            have no scored question in common, or one question has two texts.
    """
    return compare_answers(a, b, read_answers(a), read_answers(b))


def compare_answers(
    a: Path, b: Path, answers_a: Sequence[Answer], answers_b: Sequence[Answer]
) -> Comparison:
    """Compare the answers of two files, as `compare_files`.

    Raises:
        ValueError: as `compare_files`, for files that have been read.
    """
    first = {answer.key: answer for answer in answers_a}
    second = {answer.key: answer for answer in answers_b}
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ValueError(
            f"{a} and {b} have no question in common (sets {_sets(first.values())} and "
            f"{_sets(second.values())}); compare two evaluations of the same sets"
        )
    for path, answers in ((a, first), (b, second)):
        if any(answer.attempt for answer in answers.values()):
            raise ValueError(
                f"{path} has several answers to a question (--attempts), and a comparison pairs "
                "one with one; evaluate without --attempts to compare"
            )
    for key in common:
        if first[key].question != second[key].question:
            raise ValueError(
                f"question {key[1]!r} of set {key[0]!r} differs between {a} and {b}; compare "
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
    for pair in pairs:
        by_set.setdefault(pair[0].set, []).append(pair)
    return Comparison(
        a=a,
        b=b,
        only_a=len(first) - len(common),
        only_b=len(second) - len(common),
        failed=len(pairs) - len(scored),
        components=sorted({*components_of(a), *components_of(b)}),
        overall=compare_pairs(pairs),
        sets={name: compare_pairs(members) for name, members in by_set.items()},
        flips=list(_flips(scored)),
    )


def _flips(pairs: Sequence[Pair]) -> Iterator[Flip]:
    for a, b in pairs:
        measure = "reward" if None in (a.em, b.em) else "em"
        first, second = getattr(a, measure), getattr(b, measure)
        if None not in (first, second) and first != second:
            better = "A" if first > second else "B"
            yield Flip(a.set, a.id, a.question, better, measure, first, second)


def _sets(answers: Any) -> str:
    return ", ".join(sorted({answer.set for answer in answers}))


def compare_pairs(pairs: Sequence[Pair]) -> GroupComparison:
    """Compare answers pairwise; a pair with a question that failed counts as such only."""
    scored = [pair for pair in pairs if not (pair[0].failed or pair[1].failed)]
    tools = sorted({tool for pair in scored for answer in pair for tool in answer.calls})
    found = [(_values(a, tools), _values(b, tools)) for a, b in scored]
    measures: dict[str, MeasureComparison] = {}
    for name in dict.fromkeys(name for a, _ in found for name in a):
        values = [(a[name], b[name]) for a, b in found if name in a and name in b]
        if values:
            xs, ys = [x for x, _ in values], [y for _, y in values]
            measures[name] = MeasureComparison(
                n=len(values),
                a=sum(xs) / len(xs),
                b=sum(ys) / len(ys),
                difference=paired_difference(xs, ys),
            )
    return GroupComparison(
        n=len(scored),
        failed_a=sum(a.failed for a, _ in pairs),
        failed_b=sum(b.failed for _, b in pairs),
        measures=measures,
        mcnemar=_mcnemar(scored),
    )


def _values(answer: Answer, tools: Sequence[str]) -> dict[str, float]:
    """Return the numbers of an answer by name, without those it does not have."""
    numbers = {name: getattr(answer, name) for name in MEASURES}
    numbers |= {k: v for k, v in answer.components.items() if k not in BY_ANOTHER_NAME}
    numbers |= {f"{CALLS}{tool}": answer.calls.get(tool, 0) for tool in tools}
    return {name: float(value) for name, value in numbers.items() if value is not None}


def _mcnemar(pairs: Sequence[Pair]) -> McNemar | None:
    right = [(a.em == 1.0, b.em == 1.0) for a, b in pairs if None not in (a.em, b.em)]
    if not right:
        return None
    only_a = sum(a and not b for a, b in right)
    only_b = sum(b and not a for a, b in right)
    return McNemar(only_a, only_b, mcnemar_exact(only_a, only_b))


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return a comparison as a table in lines of text; a pipe would cut those of `rich`."""
    groups = dict(comparison.sets)
    if len(groups) > 1:
        groups["all sets"] = comparison.overall
    width = max(12, *(len(name) for name in groups))
    shown = {name: _shown(group, comparison.components) for name, group in groups.items()}
    wide = max(15, *(len(measure) for names in shown.values() for measure in names))
    head = f"{'set':<{width}}  {'measure':<{wide}} {'n':>6} {'A':>8} {'B':>8} {'B - A':>8}"
    lines = [f"A: {comparison.a}", f"B: {comparison.b}", f"{head}  {'95 % interval':<19} McNemar"]
    for name, group in groups.items():
        for measure in shown[name]:
            values = group.measures[measure]
            test = ""
            if measure == "em" and group.mcnemar is not None:
                m = group.mcnemar
                test = f"p = {m.p:.4g} (only A {m.only_a}, only B {m.only_b})"
            d = values.difference
            row = (
                f"{name:<{width}}  {measure:<{wide}} {values.n:>6} {values.a:>8.3f} "
                f"{values.b:>8.3f} {d.mean:>+8.3f}  [{d.low:+.3f}, {d.high:+.3f}]    {test}"
            )
            lines.append(row.rstrip())
        if group.failed_a or group.failed_b:
            lines.append(
                f"{name:<{width}}  {'failed':<{wide}} {'':>6} {group.failed_a:>8} "
                f"{group.failed_b:>8}"
            )
    left_out = {
        "only in A": comparison.only_a,
        "only in B": comparison.only_b,
        "failed": comparison.failed,
    }
    if any(left_out.values()):
        parts = ", ".join(f"{count} {name}" for name, count in left_out.items() if count)
        lines.append(f"left out: {parts}")
    return lines


def flip_lines(flips: Sequence[Flip]) -> list[str]:
    """Return the questions that one of the two answered better, a line each, up to a limit."""
    lines: list[str] = []
    for name in ("A", "B"):
        found = [flip for flip in flips if flip.better == name]
        if not found:
            continue
        lines.append(f"better in {name}: {len(found)}")
        for flip in found[:FLIPS_SHOWN]:
            question = " ".join(flip.question.split())
            shown = question if len(question) <= QUESTION_CHARS else f"{question[:QUESTION_CHARS]}…"
            scores = f"{flip.measure} {flip.a:g} and {flip.b:g}"
            lines.append(f"  {flip.set}  {flip.id}  {scores}  {shown}")
        if len(found) > FLIPS_SHOWN:
            lines.append(f"  and {len(found) - FLIPS_SHOWN} more; --out FILE has all of them")
    return lines


def _shown(group: GroupComparison, components: Sequence[str]) -> list[str]:
    named = {*MEASURES, *components}
    return [name for name in group.measures if name in named or name.startswith(CALLS)]
