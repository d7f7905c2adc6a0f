"""Questions about a world: chains of one to four relations, and comparisons of birth years.

Reads a `World`; `generate.py` adds the budget of calls and writes the questions to task files.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scripted import UNKNOWN
from world import CHAIN_A, CHAIN_B, FAMILY_A, FAMILY_B, Split, World

PEOPLE = (*FAMILY_A, *FAMILY_B)
"""Relations that lead to a person, so that a chain can go on."""
CHAINED = (*CHAIN_A, *CHAIN_B)
HELD_OUT = frozenset(
    (first, CHAINED[(i + gap) % len(CHAINED)]) for i, first in enumerate(PEOPLE) for gap in (3, 7)
)
"""Pairs of relations, one after the other, that no demonstration and no training question has."""
ORDERS = ("earlier", "later")


@dataclass(frozen=True)
class Wording:
    """One way to ask; `{path}` is the relations of a chain, in the order they are taken."""

    chain: str
    comparison: str


WORDINGS = (
    Wording(
        " Start at {start} and follow {path}.",
        " Who was born {order}, {a} or {b}?",
    ),
    Wording(
        " From {start} go by {path}.",
        " Tell me who is {order} born, {a} or {b}.",
    ),
    Wording(
        " Tell me where {start} leads by {path}.",
        " Name the {order} born, {a} or {b}.",
    ),
    Wording(
        " Take {start}, then {path}.",
        " Take {a} or {b}: who was born {order}?",
    ),
)
"""In the demonstrations and in training."""
OTHER_WORDINGS = (
    Wording(
        " From {start} follow {path}.",
        " Tell me who was born {order}, {a} or {b}.",
    ),
    Wording(
        " Start at {start}, then go by {path}.",
        " Name who was {order} born: {a} or {b}.",
    ),
)
"""Only in the set `wording`: every word of it occurs in the others."""


@dataclass(frozen=True)
class Question:
    """One question with its answer and the way to it."""

    text: str
    answer: str
    type: str
    starts: tuple[str, ...]
    relations: tuple[str, ...]
    order: str = ""
    """`earlier` or `later` for a comparison, else empty."""

    @property
    def hops(self) -> int:
        """Facts that it takes."""
        return len(self.relations)


Maker = Callable[[World, Split, random.Random, Sequence[Wording]], Question | None]


def _relations(rng: random.Random, hops: int, pool: Sequence[str]) -> tuple[str, ...]:
    """A path of different relations; only the last may lead to something else than a person."""
    people = [relation for relation in pool if relation in PEOPLE]
    inner = rng.sample(people, hops - 1)
    return (*inner, rng.choice([relation for relation in pool if relation not in inner]))


def has_held_out(relations: Sequence[str]) -> bool:
    """Whether a chain has a pair of relations that is never trained."""
    return any(pair in HELD_OUT for pair in pairwise(relations))


def chain(
    hops: int,
    *,
    pool: Sequence[str] = CHAINED,
    held_out: bool = False,
    answerable: bool = True,
) -> Maker:
    """Return what makes chains of one length.

    Args:
        hops: relations of the chain.
        pool: which relations.
        held_out: with a pair of `HELD_OUT`; without any, if False.
        answerable: whether the last fact exists.
    """

    def make(
        world: World, split: Split, rng: random.Random, wordings: Sequence[Wording]
    ) -> Question | None:
        relations = _relations(rng, hops, pool)
        start = rng.choice(world.of(split)).full_name
        values = world.follow(start, relations)
        names = [name.rpartition(" ")[0] or name for name in (start, *values)]
        found = hops if answerable else hops - 1
        if (
            has_held_out(relations) != held_out
            or len(values) != found
            or len(set(names)) != len(names)
        ):
            return None
        text = rng.choice(wordings).chain.format(start=start, path=" ".join(relations))
        answer = values[-1] if answerable else UNKNOWN
        kind = f"{hops}_hop" if answerable else "unanswerable"
        return Question(text, answer, kind, (start,), relations)

    return make


def comparison(
    world: World, split: Split, rng: random.Random, wordings: Sequence[Wording]
) -> Question | None:
    """Who of two people, both filed under their own names, was born earlier or later."""
    a, b = rng.sample(world.of(split), 2)
    if (
        a.name == b.name
        or a.facts["born"] == b.facts["born"]
        or {a.name, b.name} & set(world.aliases)
    ):
        return None
    order = rng.choice(ORDERS)
    pick = min if order == "earlier" else max
    answer = pick(a, b, key=lambda person: int(person.facts["born"])).full_name
    starts = (a.full_name, b.full_name)
    text = rng.choice(wordings).comparison.format(order=order, a=starts[0], b=starts[1])
    return Question(text, answer, "comparison", starts, ("born", "born"), order)


ANSWERABLE: Mapping[Maker, float] = {
    chain(1): 0.2,
    chain(2): 0.25,
    chain(3): 0.35,
    comparison: 0.2,
}
UNANSWERABLE: Mapping[Maker, float] = {
    chain(hops, answerable=False): share for hops, share in ((1, 0.25), (2, 0.35), (3, 0.4))
}
UNANSWERABLE_SHARE = 0.12
"""Of the training questions; evaluation asks them in a set of their own."""
TRAINED: Mapping[Maker, float] = {
    **{make: share * (1 - UNANSWERABLE_SHARE) for make, share in ANSWERABLE.items()},
    **{make: share * UNANSWERABLE_SHARE for make, share in UNANSWERABLE.items()},
}


@dataclass(frozen=True)
class QuestionSet:
    """One file of questions."""

    shares: Mapping[Maker, float]
    """Of its kinds of question."""
    split: Split = "test"
    wordings: Sequence[Wording] = WORDINGS


SETS: Mapping[str, QuestionSet] = {
    "in_domain": QuestionSet(ANSWERABLE),
    "longer": QuestionSet({chain(4, pool=CHAIN_B): 1.0}),
    "compositions": QuestionSet({chain(2, held_out=True): 0.5, chain(3, held_out=True): 0.5}),
    "wording": QuestionSet(ANSWERABLE, wordings=OTHER_WORDINGS),
    "unanswerable": QuestionSet(UNANSWERABLE),
    "development": QuestionSet(ANSWERABLE, split="dev"),
}
"""What is evaluated; `longer` asks for one hop more than training does."""
DEMONSTRATED: Mapping[Maker, float] = {
    **{make: share * 0.8 for make, share in TRAINED.items()},
    chain(4, pool=CHAIN_A): 0.12,
    chain(5, pool=CHAIN_A): 0.08,
}
RECITED: Mapping[Maker, float] = {
    chain(2): 0.2,
    chain(3): 0.3,
    chain(4): 0.25,
    chain(4, pool=CHAIN_B): 0.25,
}
"""Chains whose relations are said, without a search for any of them."""


def make_questions(
    world: World, questions: QuestionSet, count: int, rng: random.Random
) -> list[Question]:
    """Sample `count` different questions with the given shares of kinds, in random order."""
    found: dict[str, Question] = {}
    wanted = 0.0
    for make, share in questions.shares.items():
        wanted += count * share
        while len(found) < round(wanted):
            question = make(world, questions.split, rng, questions.wordings)
            if question is not None:
                found.setdefault(question.text, question)
    result = list(found.values())
    rng.shuffle(result)
    return result
