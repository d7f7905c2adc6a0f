"""Fit of a search: turns that were continued --> whether a scorer can lead it, and a setting.

`agent-r1 evaluate --decode value_guided --decode-fit` asks for places on development questions and
writes what comes out into the run folder. Pure functions.

One turn is looked at: what the candidate is worth that the rule takes, in states that a search
comes to. `tilted` is the rule itself, so what is fitted is what will be done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations, product
from statistics import fmean, variance
from typing import Annotated, NamedTuple

from pydantic import Field

from agent_r1.evaluation.answer_file import Candidate, Place
from agent_r1.evaluation.statistics import bootstrap_mean
from agent_r1.runtime.tilting import Proposal, tilted
from agent_r1_proto.messages import Message

LEAST_AUC = 0.6
"""Below it, a scorer does not lead a search."""
BETAS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
BRANCH_BELOW = (0.5, 0.9, None)


class Setting(NamedTuple):
    """One of those that are tried; `Decoding` says what the fields mean."""

    candidates: int
    beta: float
    branch_below: float | None
    answer_offset: float | None


class Guidance(Message):
    """How well a scorer tells candidates of one state apart, and the best setting for it."""

    places: int
    """States with several candidates, on which all of this was measured."""
    auc: float
    """Share of pairs of candidates of one state that it puts in order, of those it compares."""
    delta: float
    """Spread of what candidates of one state are worth, as far as the scorer sees it."""
    sigma: float
    """Spread of what it does not see, without that of the continuations themselves."""
    temperature: float
    """At which candidates were sampled."""
    candidates: Annotated[int, Field(ge=0)]
    """Best number beside the greedy turn; 0 is greedy."""
    beta: float
    branch_below: float | None
    answer_offset: float | None = None
    """None: calls were compared with calls and answers with answers, and AUC, delta and sigma are
    about those."""
    gain: tuple[float, float, float]
    """Mean reward of what is taken minus that of the greedy turn, and its 95 % interval over
    states."""

    @property
    def useful_width(self) -> float:
        """exp((delta / sigma)^2): from more candidates on, a search finds the scorer's mistakes.

        Source: arXiv:2603.15377.
        """
        return math.exp(min((self.delta / max(self.sigma, 1e-9)) ** 2, 50.0))

    @property
    def why_not(self) -> str:
        """Why a search should not be led by the scorer; "" where it should."""
        if self.auc < LEAST_AUC:
            return (
                f"the scorer puts {self.auc:.0%} of the pairs of candidates in order, and "
                f"{LEAST_AUC:.0%} are needed"
            )
        if self.gain[1] <= 0.0:
            return (
                f"the turns that a search takes are worth {self.gain[0]:+.3f} "
                f"[{self.gain[1]:+.3f}, {self.gain[2]:+.3f}] more than greedy ones"
            )
        return ""


def guidance(places: Sequence[Place], temperature: float, width: int) -> Guidance:
    """Measure a scorer and fit the setting.

    Args:
        places: of which every candidate was scored.
        temperature: at which candidates were sampled.
        width: how many were sampled in each place.

    Raises:
        ValueError: there is no place, or a candidate without a value or no greedy one.
    """
    _check(places)
    offset = _answer_offset(places)
    compared = {None: places} | ({} if offset is None else {offset: _all_compared(places, offset)})
    widths = [0, *(2**i for i in range(1, 10) if 2**i < width), width]
    greedy = [_greedy(place).mean for place in places]
    grid = [Setting(*values) for values in product(widths, BETAS, BRANCH_BELOW, compared)]
    gains = {
        setting: [
            _taken(place, setting) - base
            for place, base in zip(compared[setting.answer_offset], greedy, strict=True)
        ]
        for setting in grid
    }
    best = max(grid, key=lambda setting: round(fmean(gains[setting]), 9))  # the first of equals
    gain = bootstrap_mean(gains[best])
    delta, sigma = _signal_and_noise(compared[best.answer_offset])
    return Guidance(
        places=len(places),
        auc=_auc(compared[best.answer_offset]),
        delta=delta,
        sigma=sigma,
        temperature=temperature,
        **best._asdict(),
        gain=(gain.mean, gain.low, gain.high),
    )


def _check(places: Sequence[Place]) -> None:
    if not places:
        raise ValueError(
            "no state had several candidates; raise the temperature, or ask more questions"
        )
    for place in places:
        if any(candidate.value is None for candidate in place.candidates):
            raise ValueError("a candidate has no value; ask with a scorer and a beta above 0")
        if not any(candidate.greedy for candidate in place.candidates):
            raise ValueError("a state has no greedy candidate; let a search propose them")


def _answer_offset(places: Sequence[Place]) -> float | None:
    """Return how much more answers are underrated than calls; None where one of both is missing."""
    missed = {
        calls: [c.mean - _value(c) for p in places for c in p.candidates if c.calls == calls]
        for calls in (True, False)
    }
    return fmean(missed[False]) - fmean(missed[True]) if all(missed.values()) else None


def _all_compared(places: Sequence[Place], answer_offset: float) -> list[Place]:
    """Return the places as if answers were calls, with values that are comparable."""
    return [
        place.model_copy(
            update={
                "candidates": [
                    c
                    if c.calls
                    else c.model_copy(update={"calls": True, "value": _value(c) + answer_offset})
                    for c in place.candidates
                ]
            }
        )
        for place in places
    ]


def _greedy(place: Place) -> Candidate:
    (greedy,) = (c for c in place.candidates if c.greedy)
    return greedy


def _taken(place: Place, setting: Setting) -> float:
    """Return what the turn is worth that a setting takes, of candidates that are comparable."""
    greedy = _greedy(place)
    if setting.branch_below is not None and math.exp(greedy.logprob) >= setting.branch_below:
        return greedy.mean
    offered = [
        c
        for c in place.candidates
        if c.greedy or (c.sample is not None and c.sample < setting.candidates)
    ]
    counts = tilted([Proposal(c.logprob, c.calls, _value(c)) for c in offered], setting.beta)
    return offered[counts.index(max(counts))].mean


def _value(candidate: Candidate) -> float:
    assert candidate.value is not None
    return candidate.value


def _of_a_kind(places: Iterable[Place]) -> Iterator[list[Candidate]]:
    """Yield the candidates of each place that call, and those that do not, where there are two."""
    for place, calls in product(places, (True, False)):
        found = [candidate for candidate in place.candidates if candidate.calls == calls]
        if len(found) > 1:
            yield found


def _auc(places: Sequence[Place]) -> float:
    """Return the mean over places that have pairs; ties of values count half; 0.5 without pairs."""
    found: list[float] = []
    for candidates in _of_a_kind(places):
        pairs = [(a, b) for a, b in permutations(candidates, 2) if a.mean > b.mean]
        if pairs:
            found.append(fmean(_order(_value(a), _value(b)) for a, b in pairs))
    return fmean(found) if found else 0.5


def _order(better: float, worse: float) -> float:
    return 0.5 if better == worse else float(better > worse)


def _signal_and_noise(places: Sequence[Place]) -> tuple[float, float]:
    """Return the spread within places that a line through the values explains, and the rest.

    Spread is a standard deviation around the mean of the place; the rest is without the variance
    that means of so many continuations have by themselves.
    """
    values: list[float] = []
    worth: list[float] = []
    noise: list[float] = []
    for candidates in _of_a_kind(places):
        value, mean = fmean(map(_value, candidates)), fmean(c.mean for c in candidates)
        values += [_value(c) - value for c in candidates]
        worth += [c.mean - mean for c in candidates]
        noise += [_variance_of_mean(c.outcomes) for c in candidates]
    if not values or not any(values):
        return 0.0, 1.0
    slope = _product(values, worth) / _product(values, values)
    explained = slope**2 * fmean(value**2 for value in values)
    rest = fmean((w - slope * v) ** 2 for w, v in zip(worth, values, strict=True)) - fmean(noise)
    return math.copysign(math.sqrt(explained), slope), math.sqrt(max(rest, 0.0))


def _variance_of_mean(outcomes: Sequence[float]) -> float:
    return variance(outcomes) / len(outcomes) if len(outcomes) > 1 else 0.0


def _product(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(first, second, strict=True))
