"""The figures of `agent-r1 diagnose`, each with its bound: whether a task can tell methods apart.

cli/evaluation/diagnose.py --rewards of scripted policies and of the model's answers--> here
--lines, JSON--> the user. Pure functions. A missed bound is a fault of the task or of its base
model: they are to be changed, not the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from agent_r1.evaluation.statistics import bootstrap_mean, pass_at

ORACLE = 0.98
DEGENERATE = 0.5
GREEDY = 0.5
PASS = 0.1
MIXED = 0.5
TOP_SHARE = 0.5
COSINE = 0.9

Rewards = Mapping[str, Sequence[float]]
"""Outcome rewards by set."""


@dataclass(frozen=True)
class Figure:
    """One number and its bound."""

    name: str
    value: float
    bound: float
    at_least: bool
    """Whether the bound is the least or the greatest value allowed."""
    low: float | None = None
    """Lower end of the 95 % interval, which must be above 0; None where no interval is asked."""

    @property
    def passed(self) -> bool:
        """Return whether the value keeps its bound."""
        kept = self.value >= self.bound if self.at_least else self.value <= self.bound
        return kept and (self.low is None or self.low > 0)

    def line(self) -> str:
        """Return the figure as one line."""
        side = "at least" if self.at_least else "at most"
        low = "" if self.low is None else f", interval from {self.low:.3f}"
        verdict = "ok    " if self.passed else "missed"
        return f"{verdict}  {self.name:<40} {self.value:.3f}  ({side} {self.bound:g}{low})"

    def record(self) -> dict[str, Any]:
        """Return the figure as JSON values."""
        return {**asdict(self), "passed": self.passed}


def scripted_figures(oracle: Rewards | None, degenerate: Mapping[str, Rewards]) -> list[Figure]:
    """Compare policies without a model to their bounds.

    Args:
        oracle: of the one that makes no mistake.
        degenerate: of those that lack an ability, by name; per set, the best one counts.
    """
    figures = [
        Figure(f"oracle, {name}", fmean(rewards), ORACLE, at_least=True)
        for name, rewards in (oracle or {}).items()
    ]
    means = {
        (of, name): fmean(rewards)
        for name, sets in degenerate.items()
        for of, rewards in sets.items()
    }
    for of in dict.fromkeys(of for of, _ in means):
        best = max((name for at, name in means if at == of), key=lambda name: means[of, name])
        figures.append(Figure(f"{best}, {of}", means[of, best], DEGENERATE, at_least=False))
    return figures


def base_figures(
    greedy: Rewards, sampled: Mapping[str, Sequence[Sequence[float]]], above: float
) -> list[Figure]:
    """Compare the model's answers to their bounds.

    Args:
        greedy: of the greedy answers.
        sampled: by set, [questions][attempts] outcome rewards of sampled answers.
        above: an answer is right where its reward is above this.
    """
    figures: list[Figure] = []
    for name, rewards in greedy.items():
        right = [float(reward > above) for reward in rewards]
        figures.append(Figure(f"greedy, {name}", fmean(right), GREEDY, at_least=False))
    for name, questions in sampled.items():
        k = max(len(rewards) for rewards in questions)
        passed = [
            pass_at(k, sum(reward > above for reward in rewards), len(rewards))
            for rewards in questions
            if len(rewards) == k  # an answer that failed leaves its question out
        ]
        found = bootstrap_mean(passed)
        figures.append(Figure(f"pass@{k}, {name}", found.mean, PASS, at_least=True, low=found.low))
    return figures


def training_figures(
    groups: Sequence[Sequence[float]], top_shares: Sequence[float], cosines: Sequence[float]
) -> list[Figure]:
    """Compare groups and gradients to their bounds.

    Args:
        groups: [groups][samples] rewards; a group is mixed where they differ.
        top_shares: share of the gradient in one direction, of each batch.
        cosines: between two estimators' gradients, of each batch.
    """
    mixed = fmean(float(min(rewards) < max(rewards)) for rewards in groups)
    return [
        Figure("mixed groups", mixed, MIXED, at_least=True),
        Figure("gradient in one direction", fmean(top_shares), TOP_SHARE, at_least=False),
        Figure("cosine with turn-level GAE", fmean(cosines), COSINE, at_least=False),
    ]
