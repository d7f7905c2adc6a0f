"""The world: invented people, several to a name, and the catalogue that holds one fact an entry.

A seed goes in; `generate.py` writes the catalogue to `corpus.jsonl` (what search finds: relation
and name, without the number that tells namesakes apart) and `entries.jsonl` (what reading an entry
says). Names are pairs of words from fixed pools, the same for every seed, so one tokenizer fits
all worlds. Names are split into train, dev and test; no fact links two splits.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Split = Literal["train", "dev", "test"]

SPLIT_SHARES: Mapping[Split, float] = {"train": 0.7, "dev": 0.1, "test": 0.2}
NUMBERS = ("I", "II", "III")
"""Tell the people of one name apart; the catalogue's search does not know them."""

YEARS = tuple(str(year) for year in range(1800, 2000, 10))
TOWNS = tuple(
    head + tail
    for head in ("Ash", "Bram", "Cald", "Dun", "Elm", "Holt")
    for tail in ("mere", "wick", "stow", "ham")
)

TRADES = (
    *("baker", "mason", "tailor", "miller", "cooper", "weaver"),
    *("potter", "tanner", "joiner", "brewer", "glazier", "fuller"),
)

FAMILY_A = ("mother", "father", "sister", "uncle")
FAMILY_B = ("teacher", "doctor", "rival", "boss")
VALUES: Mapping[str, Sequence[str]] = {"town": TOWNS, "trade": TRADES, "born": YEARS}
"""Relation -> its values, where these are no people."""

RELATIONS = (*FAMILY_A, "town", *FAMILY_B, "trade", "born")
CHAIN_A = (*FAMILY_A, "town")
CHAIN_B = (*FAMILY_B, "trade")
"""Two families of relations: chains of four are demonstrated in one and asked in the other."""
SEE = "see"
"""Heading of an entry that only names the name under which somebody's facts are filed."""

FACT_SHARE = 0.85
"""Chance that a person has a fact of a relation; a birth year is always known."""
ALIAS_SHARE = 0.25
"""Share of names that are filed under another one."""
NUM_NAMES = 800


def _combine(heads: str, tails: str) -> tuple[str, ...]:
    return tuple(head + tail for head in heads.split() for tail in tails.split())


FIRST_NAMES = _combine("Bel Cor Dar Fen Gil Har Jor Kal", "an eo im ud wyn ok ath ix")
LAST_NAMES = _combine("Abr Ebr Igl Ocr Umb Zad Vosk Tarn", "ak ero um ild onna u ey osz")
ID_HEADS = tuple(f"K{i:02d}" for i in range(100))
ID_TAILS = tuple(f".{i:03d}" for i in range(220))


@dataclass
class Person:
    """One person: name, number among the namesakes, and facts."""

    name: str
    number: str
    split: Split
    facts: dict[str, str] = field(default_factory=dict)
    """Relation -> full name of a person of the same split, or a value of `VALUES`."""

    @property
    def full_name(self) -> str:
        """Name and number: what questions and entries call the person."""
        return f"{self.name} {self.number}"


@dataclass(frozen=True)
class Entry:
    """One entry of the catalogue."""

    id: str
    name: str
    """The name it is filed under."""
    heading: str
    """A relation, or `SEE`."""
    text: str
    """What reading it says."""

    @property
    def passage(self) -> dict[str, str]:
        """What search knows of it."""
        return {"id": self.id, "title": self.name, "text": self.heading}


@dataclass(frozen=True)
class World:
    """All people of one seed by full name, and the catalogue."""

    people: Mapping[str, Person]
    aliases: Mapping[str, str]
    """Name -> the name it is filed under, where that is another one."""
    entries: Sequence[Entry]

    def of(self, split: Split) -> list[Person]:
        """People of one split, in a fixed order."""
        return [person for person in self.people.values() if person.split == split]

    def follow(self, start: str, relations: Iterable[str]) -> list[str]:
        """Values met when following `relations` from `start`, as far as facts exist."""
        values: list[str] = []
        for relation in relations:
            person = self.people.get(values[-1] if values else start)
            if person is None or relation not in person.facts:
                break
            values.append(person.facts[relation])
        return values


def make_world(seed: int, num_names: int = NUM_NAMES) -> World:
    """Build the world of one seed (the same for the same seed and number of names)."""
    rng = random.Random(f"deep-world-{seed}")
    num_aliases = round(num_names * ALIAS_SHARE)
    pairs = [f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES]
    names = rng.sample(pairs, num_names + num_aliases)
    names, others = names[:num_names], names[num_names:]
    aliases = dict(zip(rng.sample(names, num_aliases), others, strict=True))
    people: dict[str, Person] = {}
    splits = rng.sample(list(SPLIT_SHARES), num_names, counts=_counts(num_names))
    for name, split in zip(names, splits, strict=True):
        for number in sorted(rng.sample(NUMBERS, rng.choice((2, 3)))):
            person = Person(name, number, split)
            people[person.full_name] = person
    for split in SPLIT_SHARES:
        _add_facts([p for p in people.values() if p.split == split], rng)
    return World(people, aliases, _catalogue(people.values(), aliases, rng))


def _counts(total: int) -> list[int]:
    counts = [round(total * share) for share in SPLIT_SHARES.values()]
    counts[0] += total - sum(counts)
    return counts


def _add_facts(people: Sequence[Person], rng: random.Random) -> None:
    full_names = [person.full_name for person in people]
    for person in people:
        for relation in RELATIONS:
            value = rng.choice(VALUES.get(relation, full_names))
            known = relation == "born" or rng.random() < FACT_SHARE
            if known and not value.startswith(f"{person.name} "):
                person.facts[relation] = value


def _catalogue(
    people: Iterable[Person], aliases: Mapping[str, str], rng: random.Random
) -> list[Entry]:
    """One entry a fact and one an alias, in random order with random ids."""
    drafts = [(name, SEE, f" {SEE} {name}: {alias}.") for name, alias in aliases.items()]
    for person in people:
        filed = aliases.get(person.name, person.name)
        drafts += [
            (filed, relation, entry_text(relation, f"{filed} {person.number}", value))
            for relation, value in person.facts.items()
        ]
    rng.shuffle(drafts)
    ids = rng.sample([head + tail for head in ID_HEADS for tail in ID_TAILS], len(drafts))
    return [Entry(i, *draft) for i, draft in zip(ids, drafts, strict=True)]


def entry_text(relation: str, full_name: str, value: str) -> str:
    """What an entry says; a year stands before the name, so that it can be copied with it."""
    if relation == "born":
        return f" born {value}: {full_name}."
    return f" {relation} of {full_name}: {value}."
