"""Scores of a result file: means with intervals per set, per type and per number of hops.

Lines of `answer_file.py` --> `{out}.summary.json` and the lines the command prints. Everything
comes from the lines, so anyone can compute it again; the order of the lines does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any

from agent_r1.evaluation.answer_file import Answer, Facts
from agent_r1.evaluation.choosing import SCORERS, best_by, majority
from agent_r1.evaluation.score_names import ScoreNames
from agent_r1.evaluation.statistics import (
    Estimate,
    bootstrap_mean,
    interval_record,
    pass_all,
    pass_at,
)

SPENDING = {
    "sampled_tokens": "sampled tokens",
    "scorer_tokens": "scorer tokens",
    "discarded_calls": "discarded calls",
    "replayed_calls": "replayed calls",
    "places": "states with a choice",
    "searched": "questions searched",
}
"""Numbers of a line that say what a search has cost, and whether it had a choice, and how they are
shown."""
MEASURES = (
    *("em", "f1", "substring_match", "reward"),
    *("num_calls", "num_turns", "seconds", *SPENDING),
)
"""Numbers of a line that are averaged; `em` is the exact match."""
RIGHT = ("math_equal", "all_tests_passed", "exact_match")
"""Reward components that are 1.0 for a right answer; the first one that an answer has decides.
Exact match comes last: it is the default, and the others are asked for."""
NO_CALLS = Estimate(0.0, 0.0, 0.0)
"""Numbers of a tool that answered no call."""
RECORDED_FACTS = ("method", "policy", "seed", "temperature", "top_k", "decoding.method")


@dataclass(frozen=True)
class GroupScores:
    """Scores of some questions; those that failed count in `failed` only."""

    n: int
    """Answers that were scored: one a question, or as many as `--attempts` says."""
    failed: int
    """Answers that were not."""
    measures: dict[str, Estimate | None]
    """Estimates by every name of `MEASURES`; None where no line has it."""
    components: dict[str, Estimate]
    """Estimates of the reward components, by name."""
    calls: dict[str, Estimate]
    """Calls that a tool answered, by the tool's name: of every tool that answered one."""
    pass_at: dict[str, Estimate]
    """Chance that one of k answers to a question is right, by k; empty with one attempt."""
    pass_all: dict[str, Estimate]
    """Chance that each of k answers is right, by k (pass^k)."""
    chosen: dict[str, Estimate]
    """Share of right answers after one of each question's has been chosen: `majority` takes the
    most frequent, and the name of a component that answer which it scores highest (best of n)."""

    def record(self) -> dict[str, Any]:
        """Return the scores as JSON values."""
        values = asdict(self)
        measures = values.pop("measures")
        return {"n": values.pop("n"), "failed": values.pop("failed"), **measures, **values}


@dataclass(frozen=True)
class SetSummary(GroupScores):
    """Scores of one set, and of its types and numbers of hops."""

    types: dict[str, GroupScores] = field(default_factory=dict)
    """Scores by `metadata.type`; questions without one are in none."""
    hops: dict[str, GroupScores] = field(default_factory=dict)
    """Scores by `metadata.hops`; questions without one are in none."""

    def record(self) -> dict[str, Any]:
        """Return the scores as JSON values."""
        return super().record() | {
            "types": {name: scores.record() for name, scores in self.types.items()},
            "hops": {name: scores.record() for name, scores in self.hops.items()},
        }


def summarise_answers(answers: Iterable[Answer]) -> dict[str, SetSummary]:
    """Average answers per set and, within it, per type and per number of hops."""
    # Sorted, so that resampling meets the questions in the same order however they came.
    ordered = sorted(answers, key=lambda answer: answer.key)
    tools = sorted({tool for answer in ordered for tool in answer.calls})
    summary: dict[str, SetSummary] = {}
    for name, members in _grouped(ordered, lambda answer: answer.set).items():
        scores = _scores(members, tools)
        summary[name] = SetSummary(
            **vars(scores),
            types={k: _scores(v, tools) for k, v in _grouped(members, lambda a: a.type).items()},
            hops={k: _scores(v, tools) for k, v in _grouped(members, lambda a: a.hops).items()},
        )
    return summary


def _grouped(
    answers: Sequence[Answer], name_of: Callable[[Answer], str | None]
) -> dict[str, list[Answer]]:
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        name = name_of(answer)
        if name is not None:
            groups.setdefault(name, []).append(answer)
    return dict(sorted(groups.items()))


def _scores(answers: Sequence[Answer], tools: Sequence[str]) -> GroupScores:
    scored = [answer for answer in answers if not answer.failed]
    questions = [list(members) for _, members in groupby(scored, key=lambda answer: answer.key[:2])]
    names = sorted({name for answer in scored for name in answer.components})
    components = {name: _mean(questions, lambda a, n=name: a.components.get(n)) for name in names}
    calls = {tool: _mean(questions, lambda a, t=tool: float(a.calls.get(t, 0))) for tool in tools}
    return GroupScores(
        n=len(scored),
        failed=len(answers) - len(scored),
        measures={name: _mean(questions, attrgetter(name)) for name in MEASURES},
        components={name: mean for name, mean in components.items() if mean is not None},
        calls={tool: mean for tool, mean in calls.items() if mean is not None},
        pass_at=_pass_rates(questions, pass_at),
        pass_all=_pass_rates(questions, pass_all),
        chosen=_choices(questions),
    )


def _mean(
    questions: Sequence[Sequence[Answer]], value_of: Callable[[Answer], float | None]
) -> Estimate | None:
    """Estimate the mean over questions of their answers' means; None where none has a value."""
    values = [[v for a in answers if (v := value_of(a)) is not None] for answers in questions]
    known = [math.fsum(of_question) / len(of_question) for of_question in values if of_question]
    return bootstrap_mean(known) if known else None


def _pass_rates(
    questions: Sequence[Sequence[Answer]], rate: Callable[[int, int, int], float]
) -> dict[str, Estimate]:
    """Estimate `rate` for k = 1, 2, 4, ... over the questions that have so many answers."""
    passed = [[p for a in answers if (p := _passes(a)) is not None] for answers in questions]
    most = max(map(len, passed), default=0)
    rates: dict[str, Estimate] = {}
    for k in [] if most < 2 else sorted({*(1 << i for i in range(most.bit_length())), most}):
        values = [rate(k, sum(p), len(p)) for p in passed if len(p) >= k]
        if values:
            rates[str(k)] = bootstrap_mean(values)
    return rates


def _choices(questions: Sequence[Sequence[Answer]]) -> dict[str, Estimate]:
    """Estimate what each way of choosing gets right; {} with one answer to each question."""
    ways: dict[str, Callable[[Sequence[Answer]], Answer | None]] = {"majority": majority}
    ways |= {name: lambda answers, n=name: best_by(answers, n) for name in SCORERS}
    found: dict[str, Estimate] = {}
    for name, choose in ways.items() if max(map(len, questions), default=0) > 1 else ():
        picked = [one for answers in questions if (one := choose(answers)) is not None]
        right = [float(p) for answer in picked if (p := _passes(answer)) is not None]
        if right:
            found[name] = bootstrap_mean(right)
    return found


def _passes(answer: Answer) -> bool | None:
    """Return whether an answer is right; None where nothing says so.

    Where none of `RIGHT` does, a component of the user's own does, if it is the only one.
    """
    known = [answer.components[name] for name in RIGHT if name in answer.components]
    own = [value for name, value in answer.components.items() if ":" in name]
    if not known and len(own) == 1:
        known = own
    return known[0] == 1.0 if known else None


def summary_record(facts: Facts, sets: dict[str, SetSummary]) -> dict[str, Any]:
    """Return what `{out}.summary.json` holds."""
    return {
        **{name: facts.get(name) for name in RECORDED_FACTS},
        "interval": interval_record("percentile bootstrap over questions"),
        "sets": {name: scores.record() for name, scores in sets.items()},
    }


def summary_lines(sets: dict[str, SetSummary], names: ScoreNames) -> list[str]:
    """Return the scores as lines of text, one a set, a type and a number of hops."""
    lines: list[str] = []
    for name, scores in sets.items():
        lines.append(_line(name, scores, names))
        if scores.measures["scorer_tokens"] is not None:
            known = {of: scores.measures[key] for key, of in SPENDING.items()}
            spent = [f"{of} {_number(mean)}" for of, mean in known.items() if mean is not None]
            lines.append(f"{'  cost of an answer':<24} {'  '.join(spent)}")
        lines += [_line(f"  {kind}", group, names) for kind, group in scores.types.items()]
        lines += [_line(f"  {hops} hops", group, names) for hops, group in scores.hops.items()]
    return lines


def _line(name: str, scores: GroupScores, names: ScoreNames) -> str:
    shown = [("reward", scores.measures["reward"])]
    shown += [(title, scores.components.get(c)) for c, title in names.titles().items()]
    shown += [(tool, scores.calls.get(tool, NO_CALLS)) for tool in names.tools if scores.n]
    failed = f"  failed {scores.failed}" if scores.failed else ""
    shown += [(f"pass@{k}", estimate) for k, estimate in scores.pass_at.items() if k != "1"]
    shown += [(f"pass^{k}", estimate) for k, estimate in scores.pass_all.items() if k != "1"]
    shown += [
        (name if name == "majority" else f"best by {name}", estimate)
        for name, estimate in scores.chosen.items()
    ]
    text = "  ".join(f"{title} {_number(estimate)}" for title, estimate in shown)
    return f"{name:<24} {text}  n {scores.n}{failed}"


def _number(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
