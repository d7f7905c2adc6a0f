"""Branches with weights, which a beam keeps: candidates for the next turn in, what goes on out.

search.py finds the candidates, and says how much each is to count.

Source: sequential Monte Carlo over turns, arXiv:2606.05296.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent_r1.rollout.turns import Branch
from agent_r1.runtime.tilting import log_sum
from agent_r1.text.reading import most_frequent

RESAMPLE_BELOW = 0.5
"""All are drawn anew where their effective number falls below this share of them."""


@dataclass(eq=False)
class Particle:
    """A branch, how many copies of it are kept, and the log of the weight of each."""

    branch: Branch
    copies: int = 1
    log_weight: float = 0.0
    candidates: Sequence[Branch] = field(init=False)
    """Branches that may follow: one turn longer, or itself once it has ended."""
    tilted: list[float] = field(init=False)
    """Log of how much each candidate is to count (tilting.py)."""

    def __post_init__(self) -> None:
        self.candidates, self.tilted = [self.branch], [0.0]
        self.greedy = self.branch
        """The greedy one of the candidates."""

    def sprout(self, name: str) -> Branch:
        """Return a branch to be made longer."""
        return self.branch.sprout(f"{self.branch.path}.{name}".lstrip("."))

    @property
    def next_weight(self) -> float:
        """Log of the weight of each copy once one of the candidates has been taken."""
        return self.log_weight + log_sum(self.tilted)

    def heirs(self, rng: random.Random) -> list[Particle]:
        """Return what its copies become: candidates, drawn in proportion to what they count."""
        counts = draw(self.tilted, self.copies, rng)
        drawn = zip(self.candidates, counts, strict=True)
        return [Particle(branch, count, self.next_weight) for branch, count in drawn if count]


def resampled(particles: Sequence[Particle], rng: random.Random) -> list[Particle]:
    """Return as many copies, each one turn longer.

    Each particle is followed by its own candidates, unless few of them carry most of the weight:
    then those of all are drawn from together, and the copies weigh the same.
    """
    keep = sum(particle.copies for particle in particles)
    weights = [particle.next_weight for particle in particles for _ in range(particle.copies)]
    if effective(weights) >= RESAMPLE_BELOW * keep:
        return [heir for particle in particles for heir in particle.heirs(rng)]
    children = [
        (branch, math.log(particle.copies) + particle.log_weight + log)
        for particle in particles
        for branch, log in zip(particle.candidates, particle.tilted, strict=True)
    ]
    counts = draw([log for _, log in children], keep, rng)
    drawn = zip(children, counts, strict=True)
    return [Particle(branch, count) for (branch, _), count in drawn if count]


def elected(particles: Sequence[Particle], values: Mapping[Branch, float], beta: float) -> Branch:
    """Return a branch whose answer has the most votes: copies times weight times exp(beta * value).

    Args:
        particles: that have ended, at least one.
        values: of branches as a whole; one without a value counts as 0.
        beta: weight of a value beside a log of a weight.
    """
    logs = [math.log(p.copies) + p.log_weight + beta * values.get(p.branch, 0.0) for p in particles]
    ranked = sorted(range(len(particles)), key=lambda i: -logs[i])
    branches = [particles[i].branch for i in ranked]
    votes = [math.exp(logs[i] - max(logs)) for i in ranked]
    return branches[most_frequent((branch.last.answer for branch in branches), votes)]


def effective(logs: Sequence[float]) -> float:
    """Return the effective sample size of weights, given their logs: 1 to their number."""
    return math.exp(2 * log_sum(logs) - log_sum([2 * log for log in logs]))


def draw(logs: Sequence[float], number: int, rng: random.Random) -> list[int]:
    """Return how often each is drawn, `number` in all, in proportion to its weight.

    The draws are spread evenly (systematic resampling), so what has a share s is drawn s * number
    times, rounded up or down.
    """
    total, at, counts = log_sum(logs), rng.random(), []
    reached = 0.0
    for log in logs:
        reached += number * math.exp(log - total)
        counts.append(0)
        while at < reached and sum(counts) < number:
            counts[-1] += 1
            at += 1.0
    counts[logs.index(max(logs))] += number - sum(counts)  # what rounding has left
    return counts
