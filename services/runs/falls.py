"""Falls of a score: the trajectories of two spans of steps --> what part each change explains.

spans.py says whether it fell; console/fall_view.py brings the records. Pure.

What a change explains is the product of two measured numbers, summed over its kinds of
trajectories: how much more often a kind occurs after than before, and how much lower its score is
than that of others in the same span (Oaxaca and Blinder). A slower tool that answers as well thus
explains nothing. Changes are taken in the order in which one causes another: tasks, weights, tools,
reward components, endings, lengths; each explains what those before it have left. Of what they all
leave, a category of trajectories may hold most: a set, or those that call a tool. The parts and the
rest add up to the fall.

Dimension key: N = trajectories of both spans, C = groups of samples, K = columns, L =
changes, R = resamples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from agent_r1.runs.spans import LEVEL, Floats
from agent_r1.runs.store import TOOL_FAILURES, flat_row

Mask = npt.NDArray[np.bool_]

RESAMPLES = 400
AT_ONCE = 256
"""Groups whose products are in memory at a time."""
SEED = 0
LEAST_SHIFT = 0.02
"""Least change of a share of trajectories that is looked into."""
LEAST_PART = 0.02
"""Least share of the fall that a change explains; below it is only listed."""
MOST_KINDS = 8
"""Most values of a change that are told apart, and least trajectories of each."""
EXAMPLES = 3
SAME_TEXT = 0.2
"""Share of a tool's results from which an equal text is no accident."""
FREE, TIME, NEUTRAL = 1e-6, 20.0, 5.0
"""Ridge penalties, in trajectories. They decide what few trajectories tell, because almost all of
one span differ from almost all of the other: beside a failure (FREE), that the spans differ by
themselves needs evidence (TIME); beside a mere change, such as a version, the change (NEUTRAL)."""
FINE = "fine"
BADNESS = BROKEN, EMPTY, SAME, _ = "failed", "empty", "the same text", FINE
"""What becomes of a call; of several, the first of these counts."""
ORDER = ("tasks", "weights", "tool", "component", "ending", "length")
"""Kinds of changes, causes before their effects."""
WITHIN = "within"
"""Kind of what no changed share explains: the trajectories of a category, such as a set, fell."""
MOST_OF_REST, LEAST_REST = 0.5, 0.2
"""Least share of the rest that is put to a category, and least rest, as a share of the fall."""
MOST_PLACES = 20


# What may have changed


@dataclass(frozen=True)
class Case:
    """One trajectory of a span."""

    record: Mapping[str, Any]
    """As record.py makes it."""
    is_after: bool
    place: tuple[str, int]
    """File and row, by which it is found again."""
    weights: str = FINE
    """What is known of the weights that sampled it; FINE: nothing bad."""

    @property
    def cluster(self) -> tuple[bool, int, object]:
        """Samples of one group: they have the task in common, so that they are not independent."""
        return self.is_after, self.record["step"], self.record["group_id"]

    def score(self, name: str) -> float | None:
        """Return its reward, or a component of it."""
        reward = self.record.get("reward") or {}
        return reward.get("total") if name == "reward" else reward.get("components", {}).get(name)


class Trait(NamedTuple):
    """Something in which trajectories differ: a value of each."""

    kind: str
    """Of ORDER, or WITHIN."""
    name: str
    values: Sequence[str | None]
    """[N] None where a trajectory has none: it then says nothing about the others."""
    penalty: float = NEUTRAL
    usual: str | None = None
    """Value that the others are compared with; None: the most frequent one before."""


@dataclass(frozen=True, eq=False)
class Factor:
    """A trait as columns of 0 and 1: one for each value but the usual one."""

    trait: Trait
    columns: Mapping[str, Mask]
    """[N] trajectories that have a value, by value; rare values together."""
    controls: Sequence[Mask]
    """[N] trajectories without a value, and those after."""

    @classmethod
    def of(cls, trait: Trait, after_N: Mask) -> Factor:
        """Tell the most frequent values apart."""
        counts = Counter(value for value in trait.values if value is not None)
        common = {v for v, count in counts.most_common(MOST_KINDS) if count >= MOST_KINDS}
        merged = [v if v is None or v in common else "other" for v in trait.values]
        before = Counter(v for v, after in zip(merged, after_N, strict=True) if v and not after)
        usual = trait.usual or next((value for value, _ in before.most_common(1)), None)
        kinds = sorted({value for value in merged if value not in (None, usual)})
        columns = {kind: np.array([v == kind for v in merged]) for kind in kinds}
        has_none = np.array([v is None for v in merged])
        controls = [mask for mask in (has_none, has_none & after_N) if mask.any()]
        return cls(trait, columns, controls)

    def moved(self, after_N: Mask) -> tuple[str, float, float]:
        """Return the value whose share has changed most, and its shares before and after."""
        shares = (
            (value, float(column[~after_N].mean()), float(column[after_N].mean()))
            for value, column in self.columns.items()
        )
        return max(shares, key=lambda one: abs(one[2] - one[1]), default=("", 0.0, 0.0))


def _traits(cases: Sequence[Case], score: str) -> list[Trait]:
    """Return all in which the trajectories of two spans may differ, for what a score did."""
    weights = Trait("weights", "weights", [case.weights for case in cases], FREE, FINE)
    traits = [*_of_tasks(cases), weights, *_of_tools(cases)]
    return [*traits, *_of_components(cases, score), *_of_behaviour(cases)]


def _factors(traits: Sequence[Trait], after_N: Mask) -> list[Factor]:
    """Return those whose shares have changed."""
    made = [Factor.of(trait, after_N) for trait in traits if trait.kind in ORDER]
    shifts = [after - before for _, before, after in (one.moved(after_N) for one in made)]
    return [one for one, shift in zip(made, shifts, strict=True) if abs(shift) >= LEAST_SHIFT]


def _binned(values: Sequence[float | None]) -> list[str | None]:
    """Return which quarter of all values each is in."""
    known = [value for value in values if value is not None]
    edges = np.unique(np.quantile(known, [0.25, 0.5, 0.75])) if known else np.empty(0)
    texts = [f"{edge:.4g}" for edge in edges]
    between = [f"{a} to {b}" for a, b in pairwise(texts)]
    names = [f"up to {texts[0]}", *between, f"above {texts[-1]}"] if texts else []
    return [None if v is None else names[int(np.searchsorted(edges, v))] for v in values]


def _of_tasks(cases: Sequence[Case]) -> Iterator[Trait]:
    """Yield the fields of the tasks, and how long the prompts are."""
    tables = [case.record["metadata"] for case in cases]
    for name in dict.fromkeys(key for table in tables for key in table):
        values = [str(table.get(name)) for table in tables]
        if 1 < len(set(values)) <= len(cases) / MOST_KINDS:  # else it is a name of each
            yield Trait("tasks", name, values)
    lengths = [case.record.get("prompt_length") for case in cases]
    yield Trait("tasks", "tokens of the prompt", _binned(lengths))


def _of_tools(cases: Sequence[Case]) -> Iterator[Trait]:
    """Yield of each tool: what became of its calls, and of the good ones version, time, length."""
    calls = [[c for turn in case.record["turns"] for c in turn["calls"]] for case in cases]
    tools = Counter(call["tool"] for some in calls for call in some if call["tool"])
    for tool, _ in tools.most_common(MOST_KINDS):  # models also write names of tools that are none
        own = [[call for call in some if call["tool"] == tool] for some in calls]
        repeated = _repeated(call for some in own for call in some)
        endings = [[_ending(call, repeated) for call in some] for some in own]
        worst = [min(of_it, key=BADNESS.index, default=None) for of_it in endings]
        yield Trait("tool", f"{tool}: result", worst, FREE, FINE)
        pairs = [zip(some, of_it, strict=True) for some, of_it in zip(own, endings, strict=True)]
        good = [[call for call, ending in of_it if ending == FINE] for of_it in pairs]
        versions = [sorted({call.get("version", "") for call in some}) for some in good]
        texts = [", ".join(some) or None for some in versions]
        yield Trait("tool", f"{tool}: version", texts)
        yield Trait(WITHIN, f"{tool}: version", texts)
        seen = [
            Counter(v for v, c in zip(texts, cases, strict=True) if v and c.is_after is side)
            for side in (False, True)
        ]
        came = [f"; version {v} came" for v, _ in seen[1].most_common(1) if v not in seen[0]]
        called = "".join(["called", *came])
        yield Trait(WITHIN, tool, [called if some else "not called" for some in own])
        times = [_mean(call.get("latency_ms", 0.0) for call in some) for some in good]
        yield Trait("tool", f"{tool}: milliseconds", _binned(times))
        lengths = [_mean(len(call.get("text", "")) for call in some) for some in good]
        yield Trait("tool", f"{tool}: length of results", _binned(lengths))
        yield Trait("length", f"{tool}: calls", _binned([len(some) for some in own]))


def _ending(call: Mapping[str, Any], repeated: set[str]) -> str:
    if call["status"] in TOOL_FAILURES:
        return BROKEN
    text = call.get("text", "").strip()
    return SAME if text in repeated else FINE if text else EMPTY


def _repeated(calls: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the texts that a tool gives to many different arguments."""
    asked: dict[str, set[str]] = {}
    for call in calls:
        if call["status"] == "ok":
            asked.setdefault(call.get("text", "").strip(), set()).add(str(call.get("arguments")))
    total = sum(map(len, asked.values()))
    return {text for text, of_it in asked.items() if text and len(of_it) > SAME_TEXT * total > 2}


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


def _of_components(cases: Sequence[Case], score: str) -> Iterator[Trait]:
    """Yield the components that rose: a policy may have learned them at the score's expense."""
    if score == "reward":
        return  # each is a part of it
    names = {name for c in cases for name in (c.record.get("reward") or {}).get("components", {})}
    for name in sorted(names - {score}):
        values = [case.score(name) for case in cases]
        before, after = (
            _mean(
                v
                for v, c in zip(values, cases, strict=True)
                if v is not None and c.is_after is side
            )
            for side in (False, True)
        )
        if before is not None and after is not None and after > before:
            yield Trait("component", name, _binned(values))


def _of_behaviour(cases: Sequence[Case]) -> Iterator[Trait]:
    rows = [flat_row(case.record, None) for case in cases]
    yield Trait("ending", "ending", [f"{row['status']}, {row['reason']}" for row in rows])
    for name, title in (("num_turns", "turns"), ("num_sampled", "sampled tokens")):
        yield Trait("length", title, _binned([row[name] for row in rows]))


# What a change explains


@dataclass(frozen=True)
class Part:
    """What one change explains of a fall."""

    kind: str
    name: str
    value: str
    """Value of it that explains most; of WITHIN, the one whose trajectories fell."""
    shares: tuple[float, float]
    """Trajectories with that value, before and after."""
    mean: float
    """Part of the fall, in units of the score."""
    low: float
    high: float
    """Bootstrap over groups of samples; of WITHIN for all categories that were looked at."""
    examples: list[tuple[str, int]]
    """Places of trajectories after with that value, the lowest scores first."""

    @property
    def is_named(self) -> bool:
        """Whether its interval lies above 0."""
        return self.low > 0.0


@dataclass(frozen=True, eq=False)
class Place:
    """What the score of a category of trajectories did."""

    trait: Trait
    value: str
    mask: Mask
    """[N] its trajectories."""
    counts: tuple[int, int]
    """Trajectories before and after."""
    means: tuple[float, float]
    """Scores before and after."""
    low: float
    high: float
    """Bootstrap over groups of samples, of after minus before."""
    parts: Floats
    """[1 + R] what it explains by having fallen more than others: of the sample, of resamples."""

    @property
    def mean(self) -> float:
        """After minus before."""
        return self.means[1] - self.means[0]


@dataclass(frozen=True)
class Explanation:
    """A fall and its parts; `fall` is `rest` plus the means of all parts."""

    fall: float
    """Mean of the trajectories before, minus that after."""
    rest: float
    """What no change explains: trajectories that are alike have another score."""
    counts: tuple[int, int]
    """Trajectories before and after."""
    parts: list[Part] = field(default_factory=list)
    """The largest first."""
    others: list[tuple[str, str, float, float]] = field(default_factory=list)
    """Changes that explain less than LEAST_PART: name, value that moved most, its shares."""
    places: list[Place] = field(default_factory=list)
    """Categories, the one first that took the mean down most."""


def explain(cases: Sequence[Case], score: str) -> Explanation | None:
    """Explain what a score did from one span to the other; None where one span has no trajectory.

    Args:
        cases: [N] trajectories of both spans; those without the score are left out.
        score: `reward`, or a component.

    Source: Oaxaca, International Economic Review 14 (1973); Blinder, Journal of Human Resources 8
        (1973).
    """
    known = [case for case in cases if case.score(score) is not None]
    values_N = np.array([case.score(score) for case in known], dtype=np.float64)
    after_N = np.array([case.is_after for case in known], dtype=bool)
    if not after_N.any() or after_N.all():
        return None
    fall = float(values_N[~after_N].mean() - values_N[after_N].mean())
    model = _Model(values_N, after_N, [case.cluster for case in known])
    traits = _traits(known, score)
    chosen, others = model.choose(_factors(traits, after_N), LEAST_PART * abs(fall))
    parts_LR, left_RK = model.resample(chosen)
    parts: list[Part] = []
    for one, part_R in zip(chosen, parts_LR, strict=True):
        value = one.moved(after_N)[0]
        bounds = float(part_R[0]), *_interval(part_R)
        parts.append(_part(known, values_N, one.trait, value, one.columns[value], bounds))
    rest = fall - sum(part.mean for part in parts)
    places = list(_places(traits, model, chosen, left_RK, after_N))
    if rest >= LEAST_REST * fall > 0:
        parts += [_part(known, values_N, *of_it) for of_it in _holding_most(places, rest)]
    counts = int((~after_N).sum()), int(after_N.sum())
    rest = fall - sum(part.mean for part in parts)
    parts.sort(key=lambda part: -part.mean)
    listed = [(one.trait.name, *one.moved(after_N)) for one in others]
    places.sort(key=lambda place: place.mean * place.counts[1])
    return Explanation(fall, rest, counts, parts, listed, places[:MOST_PLACES])


def _interval(values_R: Floats) -> tuple[float, float]:
    tail = (1 - LEVEL) / 2 * 100
    low, high = np.percentile(values_R[1:], [tail, 100 - tail])
    return float(low), float(high)


def _part(
    cases: Sequence[Case],
    values_N: Floats,
    trait: Trait,
    value: str,
    has_N: Mask,
    bounds: tuple[float, float, float],
) -> Part:
    after_N = np.array([case.is_after for case in cases])
    shares = float(has_N[~after_N].mean()), float(has_N[after_N].mean())
    some = has_N & after_N if shares[1] else after_N  # else it is the value that has gone
    worst = np.argsort(np.where(some, values_N, np.inf), kind="stable")
    examples = [cases[i].place for i in worst[: min(EXAMPLES, int(some.sum()))]]
    return Part(trait.kind, trait.name, value, shares, *bounds, examples)


def _places(
    traits: Sequence[Trait],
    model: _Model,
    chosen: Sequence[Factor],
    left_RK: Floats,
    after_N: Mask,
) -> Iterator[Place]:
    """Yield the categories that stand, as all others do, on both sides with enough groups."""
    table = model.table(chosen)
    for trait in traits:
        if trait.kind not in ("tasks", WITHIN):
            continue
        known_N = np.array([value is not None for value in trait.values])
        for value, _ in Counter(filter(None, trait.values)).most_common(MOST_KINDS):
            has_N = np.array([one == value for one in trait.values])
            masks = [
                of_it & side for of_it in (has_N, known_N & ~has_N) for side in (~after_N, after_N)
            ]
            if min(map(model.groups, masks)) < MOST_KINDS:
                continue
            before, after, others_before, others_after = (
                model.means(table, left_RK, mask) for mask in masks
            )
            # Others that fell by a half let expect the same half of this one.
            scale_R = np.maximum(before[0] / np.maximum(others_before[0], 1e-9), 1.0)
            expected_R = np.minimum((others_after[1] - others_before[1]) * scale_R, 0.0)
            part_R = has_N[after_N].mean() * (expected_R - (after[1] - before[1]))
            if before[0][0] > 0.0 >= others_before[0][0]:
                part_R *= 0.0  # others had no score to lose
            counts = int(masks[0].sum()), int(masks[1].sum())
            means = float(before[0][0]), float(after[0][0])
            interval = _interval(after[0] - before[0])
            yield Place(trait._replace(kind=WITHIN), value, has_N, counts, means, *interval, part_R)


def _holding_most(
    places: Sequence[Place], rest: float
) -> Iterator[tuple[Trait, str, Mask, tuple[float, float, float]]]:
    """Yield the category that holds most of the rest, if one surely does."""
    width = NormalDist().inv_cdf(1 - (1 - LEVEL) / 2 / max(len(places), 1))
    for place in sorted(places, key=lambda place: -place.parts[0]):
        mean, margin = float(place.parts[0]), width * float(place.parts[1:].std())
        if mean >= MOST_OF_REST * rest and mean > margin:
            yield place.trait, place.value, place.mask, (mean, mean - margin, mean + margin)
            return


class _Model:
    """Regressions of a score on the span and a factor; all sums come from products of columns."""

    def __init__(self, values_N: Floats, after_N: Mask, clusters: Sequence[object]) -> None:
        self._values_N = values_N
        self._after_N = after_N
        names = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
        self._of_N = np.array([names[name] for name in clusters])
        is_after_C = np.zeros(len(names), bool)
        is_after_C[self._of_N[after_N]] = True
        rng = np.random.default_rng(SEED)
        self._counts_RC = np.ones((1 + RESAMPLES, len(names)))  # the sample, and its resamples
        for side in (np.flatnonzero(is_after_C), np.flatnonzero(~is_after_C)):
            even = np.full(len(side), 1 / len(side))
            self._counts_RC[1:, side] = rng.multinomial(len(side), even, RESAMPLES)

    def choose(
        self, candidates: Sequence[Factor], least: float
    ) -> tuple[list[Factor], list[Factor]]:
        """Return factors in the order of ORDER, of one kind what explains most first; the rest."""
        chosen: list[Factor] = []
        for kind in ORDER:
            waiting = [one for one in candidates if one.trait.kind == kind]
            while waiting:
                gains = [self.parts([*chosen, one])[-1] for one in waiting]
                best = int(np.argmax(np.abs(gains)))
                if abs(gains[best]) < least:
                    break
                chosen.append(waiting.pop(best))
        return chosen, [one for one in candidates if one not in chosen]

    def parts(self, chosen: Sequence[Factor]) -> list[float]:
        """Return what each of some factors explains beyond those before it."""
        table = self.table(chosen)
        return _parts_of((table.T @ table)[None], chosen)[0][:, 0].tolist()

    def resample(self, chosen: Sequence[Factor]) -> tuple[Floats, Floats]:
        """Return what `_parts_of` does, of the sample and of resamples of the clusters."""
        table = self.table(chosen)
        width = table.shape[1]
        products_R = np.zeros((1 + RESAMPLES, width * width))
        for first in range(0, self._counts_RC.shape[1], AT_ONCE):
            products = np.zeros((AT_ONCE, width * width))
            for i in np.flatnonzero((self._of_N >= first) & (self._of_N < first + AT_ONCE)):
                products[self._of_N[i] - first] += np.outer(table[i], table[i]).ravel()
            counts = self._counts_RC[:, first : first + AT_ONCE]
            products_R += counts @ products[: counts.shape[1]]
        return _parts_of(products_R.reshape(-1, width, width), chosen)

    def groups(self, mask_N: Mask) -> int:
        """Return in how many clusters some trajectories are."""
        return int(np.count_nonzero(np.bincount(self._of_N[mask_N])))

    def means(self, table: Floats, left_RK: Floats, mask_N: Mask) -> tuple[Floats, Floats]:
        """Return [1 + R] means of some trajectories: of the score, and of what factors leave."""
        clusters, places = np.unique(self._of_N[mask_N], return_inverse=True)
        sums = [np.bincount(places, column) for column in table[mask_N].T]
        sums_RK = self._counts_RC[:, clusters] @ np.column_stack(sums)
        counts_R = np.maximum(sums_RK[:, 0], 1.0)
        return sums_RK[:, -1] / counts_R, (sums_RK * left_RK).sum(axis=1) / counts_R

    def table(self, chosen: Sequence[Factor]) -> Floats:
        """Return [N, K + 1]: 1, the span, the columns of the factors, the score."""
        columns = [column for one in chosen for column in (*one.columns.values(), *one.controls)]
        ones = np.ones_like(self._values_N)
        return np.column_stack([ones, self._after_N, *columns, self._values_N]).astype(np.float64)


def _parts_of(products_R: Floats, chosen: Sequence[Factor]) -> tuple[Floats, Floats]:
    """Return [L, R] what each factor explains beyond those before it, and [R, K + 1] the rest.

    A row of the table times that is what all factors leave of its score.

    Args:
        products_R: [R, K + 1, K + 1] sums of the products of the columns of `_Model.table`.
        chosen: [L] factors.
    """
    whole, after = products_R[:, 0], products_R[:, 1]
    counts_after = after[:, 1:2]
    shift = after / counts_after - (whole - after) / (whole[:, :1] - counts_after)
    left_RK = np.zeros_like(whole)
    left_RK[:, -1] = 1.0
    parts: list[Floats] = []
    start = 2
    for factor in chosen:
        end = start + len(factor.columns)
        stop = end + len(factor.controls)
        is_failure = factor.trait.penalty == FREE
        time = TIME if is_failure else FREE
        penalties = [FREE, time, *[factor.trait.penalty] * (end - start)]
        penalties += [FREE, time][: stop - end]
        own = [0, 1, *range(start, stop)]
        matrix = products_R[:, own][:, :, own] + np.diag(penalties)
        left = products_R[:, own] @ left_RK[..., None]
        slopes = np.linalg.solve(matrix, left)[:, 2 : 2 + end - start, 0]
        parts.append(-(shift[:, start:end] * slopes).sum(axis=1))
        left_RK[:, start:end] = -slopes
        start = stop
    return np.array(parts).reshape(len(chosen), len(products_R)), left_RK
