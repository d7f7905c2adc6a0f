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

import numpy as np
import numpy.typing as npt
from pydantic import Field

from agent_r1.evaluation.answer_file import Candidate, Place
from agent_r1.evaluation.statistics import bootstrap_mean
from agent_r1.runtime.tilting import Proposal, tilted
from agent_r1_proto.messages import Message

LEAST_AUC = 0.6
"""Lowest AUC with which a scorer leads a search."""
LEAST_PLACES = 100
"""Fewest places from which something is fitted: with fewer, the best of so many settings would be
one by chance."""
BETAS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
ANSWER_BIASES = (0.0, -0.5, -1.0, -1.5, -2.0, -3.0, 1.0)
BRANCH_BELOW = (0.5, 0.9, None)

Gains = npt.NDArray[np.float64]
Interval = tuple[float, float, float]
"""A mean, and its 95 % interval over states."""


class Setting(NamedTuple):
    """One of those that are tried; `Decoding` says what the fields mean."""

    candidates: int
    branch_below: float | None
    beta: float
    answer_bias: float


class Guidance(Message):
    """Quality of a scorer at telling candidates of one state apart, and its best setting."""

    places: int
    """States with several candidates, on which all of this was measured."""
    auc: float | None
    """Share of pairs of candidates of one state, both calls or both answers, that it puts in
    order; None where no scorer was asked."""
    delta: float
    """Spread of what candidates of one state are worth, as far as the scorer sees it."""
    sigma: float
    """Spread of what it does not see, without that of the continuations themselves."""
    temperature: float
    """Temperature at which candidates were sampled."""
    candidates: Annotated[int, Field(ge=0)]
    """Best number beside the greedy turn; 0 is greedy."""
    beta: float
    """0 where the scorer does not lead."""
    branch_below: float | None
    answer_bias: float = 0.0
    gain: Interval
    """Mean reward of the turn that is taken minus that of the greedy one. Measured in each half of
    the states with the setting that is best in the other half."""
    lead: Interval = (0.0, 0.0, 0.0)
    """Part of the gain that the scorer adds: the best search minus the best one that asks no
    scorer."""

    @property
    def useful_width(self) -> float:
        """exp((delta / sigma)^2), which says how many candidates a scorer can be asked about.

        Source: arXiv:2603.15377, where delta is the gap between right and wrong.
        """
        return math.exp(min((self.delta / max(self.sigma, 1e-9)) ** 2, 50.0))

    @property
    def why_unled(self) -> str:
        """Return why the scorer should not lead a search; "" where it should."""
        if self.auc is None:
            return "no scorer was asked"
        if self.auc < LEAST_AUC:
            return (
                f"the scorer puts {self.auc:.0%} of the pairs of candidates in order, and "
                f"{LEAST_AUC:.0%} are needed"
            )
        if self.lead[1] <= 0.0:
            return f"the scorer adds {_shown(self.lead)} to what a turn is worth"
        return ""

    @property
    def why_not(self) -> str:
        """Return why no search should be made; "" where one should."""
        if self.places < LEAST_PLACES:
            return f"{self.places} states had several candidates, and {LEAST_PLACES} are needed"
        if self.gain[1] <= 0.0:
            led = f"{self.why_unled}, and " if self.why_unled else ""
            more = "more than greedy ones"
            return f"{led}the turns that a search takes are worth {_shown(self.gain)} {more}"
        return ""


def _shown(interval: Interval) -> str:
    return f"{interval[0]:+.3f} [{interval[1]:+.3f}, {interval[2]:+.3f}]"


def guidance(places: Sequence[Place], temperature: float, width: int) -> Guidance:
    """Measure a scorer and fit the setting.

    Args:
        places: of which every candidate was scored, or none.
        temperature: at which candidates were sampled.
        width: how many were sampled in each place.

    Raises:
        ValueError: some candidates have a value and others none, or a place has no greedy one.
    """
    scored = _check(places)
    if not places:
        return Guidance(
            places=0,
            auc=None,
            delta=0.0,
            sigma=0.0,
            temperature=temperature,
            candidates=0,
            beta=0.0,
            branch_below=None,
            gain=(0.0, 0.0, 0.0),
        )
    widths = [0, *(2**i for i in range(1, 10) if 2**i < width), width]
    grid = [Setting(*values) for values in product(widths, BRANCH_BELOW, BETAS, ANSWER_BIASES)]
    gains = np.array([_gains(place, widths) for place in places])
    unled = np.array([setting.beta == 0.0 for setting in grid])
    blind = _gains_elsewhere(gains[:, unled])
    led = _gains_elsewhere(gains)
    found = Guidance(
        places=len(places),
        auc=_auc(places) if scored else None,
        **_signal_and_noise(places),
        temperature=temperature,
        **grid[_best(gains)]._asdict(),
        gain=_interval(led),
        lead=_interval(led - blind),
    )
    if not found.why_unled:
        return found
    best = grid[np.flatnonzero(unled)[_best(gains[:, unled])]]
    return found.model_copy(update={**best._asdict(), "gain": _interval(blind)})


def _best(gains: Gains) -> int:
    """Return the setting with the highest mean, the first of equals; [P, S] places, settings."""
    return int(np.argmax(gains.mean(axis=0).round(9)))


def _gains_elsewhere(gains: Gains) -> Gains:
    """Return [P] what each place gains by the setting that is best in the other half of them."""
    half = np.arange(len(gains)) % 2 == 0
    found = np.zeros(len(gains))
    for chosen in (half, ~half):
        if chosen.any() and not chosen.all():
            found[~chosen] = gains[~chosen, _best(gains[chosen])]
    return found


def _interval(gains: Gains) -> Interval:
    found = bootstrap_mean(gains.tolist())
    return found.mean, found.low, found.high


def _check(places: Sequence[Place]) -> bool:
    """Refuse places that cannot be measured; return whether they were scored."""
    scored = {candidate.value is not None for place in places for candidate in place.candidates}
    if len(scored) > 1:
        raise ValueError("some candidates have no value; delete the file, and ask them again")
    for place in places:
        if not any(candidate.greedy for candidate in place.candidates):
            raise ValueError("a state has no greedy candidate; let a search propose them")
    return scored == {True}


def _gains(place: Place, widths: Sequence[int]) -> Gains:
    """Return [S] the mean reward of what each setting takes minus that of the greedy turn."""
    (greedy,) = (c for c in place.candidates if c.greedy)
    sure = math.exp(greedy.logprob if place.greedy_logprob is None else place.greedy_logprob)
    searches = np.array([below is None or sure < below for below in BRANCH_BELOW])
    found: list[Gains] = []
    for width in widths:
        offered = [
            c for c in place.candidates if c.greedy or (c.sample is not None and c.sample < width)
        ]
        proposals = [Proposal(c.logprob, c.calls, _value(c)) for c in offered]
        # The rule is linear in beta and bias.
        base = np.array(tilted(proposals, 0.0))
        value = np.array(tilted(proposals, 1.0)) - base
        answer = np.array([float(not c.calls) for c in offered])
        betas, biases = np.array(BETAS)[:, None, None], np.array(ANSWER_BIASES)[:, None]
        taken = np.argmax((base + betas * value + biases * answer).round(9), axis=-1)
        gained = np.array([c.mean - greedy.mean for c in offered])[taken].ravel()
        found += [gained * search for search in searches]
    return np.concatenate(found)


def _value(candidate: Candidate) -> float:
    return candidate.value or 0.0  # where no scorer was asked, it says the same of all


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


def _signal_and_noise(places: Sequence[Place]) -> dict[str, float]:
    """Return delta, the spread within states that a line through the values explains, and sigma.

    Spread is a standard deviation around the means of states, each of which costs a degree of
    freedom; sigma is without the variance that means of so many continuations have by themselves.
    """
    values: list[float] = []
    worth: list[float] = []
    noise: list[float] = []
    free = 0
    for candidates in _of_a_kind(places):
        value, mean = fmean(map(_value, candidates)), fmean(c.mean for c in candidates)
        values += [_value(c) - value for c in candidates]
        worth += [c.mean - mean for c in candidates]
        noise += [_variance_of_mean(c.outcomes) for c in candidates]
        free += len(candidates) - 1
    if not free:
        return {"delta": 0.0, "sigma": 0.0}
    seen = _product(values, values)
    slope = _product(values, worth) / seen if seen else 0.0
    explained = slope**2 * seen / free
    left = [w - slope * v for w, v in zip(worth, values, strict=True)]
    rest = _product(left, left) / free - fmean(noise)
    return {
        "delta": math.copysign(math.sqrt(explained), slope),
        "sigma": math.sqrt(max(rest, 0.0)),
    }


def _variance_of_mean(outcomes: Sequence[float]) -> float:
    return variance(outcomes) / len(outcomes) if len(outcomes) > 1 else 0.0


def _product(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(first, second, strict=True))
