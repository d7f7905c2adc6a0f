"""Weights of candidates for a turn: their probabilities, tilted by values.

rollout/decoding searches with it, and evaluation/guidance.py fits it. Pure functions.

pi * exp(beta * Q) is the policy that earns the most Q while a KL of weight 1/beta holds it near pi
(arXiv:2310.17022). A scorer errs differently in states that have ended and in those that go on, so
calls are compared with calls and answers with answers. Between an answer and a call, pi decides,
with a bias that a fit has found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Proposal:
    """One of the turns that may follow a state."""

    logprob: float
    """Natural-log probability."""
    calls: bool
    """Whether it calls a tool."""
    value: float = 0.0
    """Value of the state behind it."""


def tilted(candidates: Sequence[Proposal], beta: float, answer_bias: float = 0.0) -> list[float]:
    """Return the log of pi * exp(beta * A + bias) for each candidate, pi summing to 1 over all.

    A is the value minus the mean value, under pi, of the candidates that also call, or also do not.

    Args:
        candidates: for one turn.
        beta: weight of a value beside a log-probability.
        answer_bias: of those that call nothing; the others have none.
    """
    total = log_sum([c.logprob for c in candidates])
    means = {
        calls: _mean([c for c in candidates if c.calls == calls])
        for calls in {c.calls for c in candidates}
    }
    biases = {True: 0.0, False: answer_bias}
    return [
        c.logprob - total + beta * (c.value - means[c.calls]) + biases[c.calls] for c in candidates
    ]


def _mean(candidates: Sequence[Proposal]) -> float:
    total = log_sum([c.logprob for c in candidates])
    return math.fsum(math.exp(c.logprob - total) * c.value for c in candidates)


def log_sum(logs: Sequence[float]) -> float:
    """Return the log of the sum of what these are logs of."""
    highest = max(logs)
    return highest + math.log(math.fsum(math.exp(log - highest) for log in logs))
