"""The world: invented people, cities, countries, works and companies, and one passage about each.

A seed goes in; `generate.py` writes the passages to `corpus.jsonl` and `questions.py` asks about
the facts. Names are pairs of words from fixed pools (the same for every seed, so one tokenizer
fits all worlds); which pairs exist, and what is true of them, follows from the seed. Train and
test entities are disjoint, refer only to entities of their own split, and share one corpus.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Split = Literal["train", "test"]

YEARS = tuple(str(year) for year in range(1800, 2000, 10))
"""Few and single-token years: a small model has to learn their order from demonstrations."""

PARENT_GAP = (2, 5)
"""A parent is born this many steps of `YEARS` earlier (at least, at most)."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _combine(heads: str, tails: str) -> tuple[str, ...]:
    return tuple(head + tail for head in heads.split() for tail in tails.split())


NAME_POOLS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "person": (
        _combine("Bel Cor Dar Fen Gil Har Jor Kal Lor Mar Nel Per", "an eo im ud wyn ok ath ix"),
        _combine(
            "Ab Ebr Igl Ocr Umb Zad Vosk Tarn Rusk Quil Plov Sten", "ak ero um ild onna u ey osz"
        ),
    ),
    "city": (
        _combine("Ash Bram Cald Dun Elm Fair Grim Holt", "mere wick by stow ham ley"),
        _words(
            "Bay Bridge Cross Falls Fields Ford Gate Green Grove Harbor Heath Hill "
            "Landing Market Mill Moor Point Quay Ridge Shore Spring Vale Water Wells"
        ),
    ),
    "country": (
        _words("North South East West Upper Lower Inner Outer"),
        _combine("Zor Vel Tham Ryn Osk Mund", "land avia istan ora"),
    ),
    "work": (
        _words(
            "Silent Golden Broken Hidden Burning Frozen Distant Empty Bitter Crimson Gentle Hollow "
            "Iron Jade Lonely Marble Narrow Ancient Pale Quiet Restless Scarlet Tender Velvet "
            "Wandering Yellow Amber Bright Cold Dark Endless Fallen Grey Humble Ivory Last "
            "Misty Noble Open Proud Rapid Secret Twisted Unseen Violet White Young Azure"
        ),
        _words(
            "Anchor Bell Candle Door Echo Feather Garden Hammer Island Journey Key Lantern "
            "Mirror Needle Orchard Painter Queen River Shadow Tower Umbrella Voyage Winter Window "
            "Arrow Basket Clock Dream Ember Flute Glass Horse Ink Jewel Kettle Letter "
            "Meadow Night Ocean Promise Rose Stone Thread Valley Whisper Youth Apple Bird"
        ),
    ),
    "company": (
        _combine("Acu Bio Cyra Dyna Exo Flux Gyro Helio", "dex lon mark nova tron vex"),
        _words(
            "Motors Works Foods Textiles Airlines Mining Press Bank Optics Chemicals Shipping "
            "Steel Radio Toys Paper Tools"
        ),
    ),
}
"""Kind -> (first words, second words). No word belongs to two pools: it tells the kind."""

CLAUSES: Mapping[str, tuple[str, ...]] = {
    "born": ("was born in {}", "was born around {}", "is said to be born in {}"),
    "birthplace": ("has the birthplace {}", "names as birthplace {}", "gives as birthplace {}"),
    "father": ("has the father {}", "was raised by father {}", "is a child of father {}"),
    "mother": ("has the mother {}", "was raised by mother {}", "is a child of mother {}"),
    "spouse": ("has the spouse {}", "is married to spouse {}", "lives with spouse {}"),
    "author": ("is a novel by {}", "was written by {}", "has the author {}"),
    "published": ("was published in {}", "came out in {}", "appeared in {}"),
    "founder": ("was started by {}", "was created by {}", "has the founder {}"),
    "founded": ("was founded in {}", "opened in {}", "dates from {}"),
    "headquarters": ("has headquarters in {}", "is based in {}", "is run from {}"),
    "country": ("lies in {}", "is a city in {}", "belongs to {}"),
    "mayor": ("has the mayor {}", "is led by mayor {}", "chose as mayor {}"),
    "capital": ("has the capital {}", "is governed from {}", "is ruled from {}"),
}
"""Relation -> ways to say it; `{}` is the value. A passage is a shuffled list of such clauses.

About people every clause holds the word that queries use: five facts dilute a short passage, and
BM25 would often rank a relative of the same surname first."""

RELATIONS: Mapping[str, Mapping[str, str]] = {
    "person": {
        "born": "year",
        "birthplace": "city",
        "father": "person",
        "mother": "person",
        "spouse": "person",
    },
    "work": {"author": "person", "published": "year"},
    "company": {"founder": "person", "headquarters": "city", "founded": "year"},
    "city": {"country": "country", "mayor": "person"},
    "country": {"capital": "city", "founded": "year"},
}
"""Kind -> relation -> kind of the value."""

COUNTS: Mapping[str, int] = {
    "person": 3600,
    "work": 1600,
    "company": 640,
    "city": 480,
    "country": 96,
}
"""Entities of each kind in a world (6,416 passages)."""

TEST_SHARE = 0.25


@dataclass
class Entity:
    """One entity: its name, kind, split, facts and the passage that states them."""

    name: str
    kind: str
    split: Split
    facts: dict[str, str] = field(default_factory=dict)
    """Relation -> value (the name of an entity of the same split, or a year)."""
    text: str = ""


@dataclass(frozen=True)
class World:
    """All entities of one seed, by name."""

    seed: int
    entities: Mapping[str, Entity]

    def of(self, kind: str, split: Split) -> list[Entity]:
        """Entities of one kind and split, in a fixed order."""
        return [e for e in self.entities.values() if e.kind == kind and e.split == split]

    def follow(self, start: str, relations: Iterable[str]) -> list[str] | None:
        """Values met when following `relations` from `start`; None where a fact is missing."""
        values: list[str] = []
        current = start
        for relation in relations:
            entity = self.entities.get(current)
            if entity is None or relation not in entity.facts:
                return None
            current = entity.facts[relation]
            values.append(current)
        return values

    def corpus(self) -> list[dict[str, str]]:
        """One passage per entity as {id, title, text}."""
        return [
            {"id": f"p{i:05d}", "title": e.name, "text": e.text}
            for i, e in enumerate(self.entities.values())
        ]


def make_world(seed: int) -> World:
    """Build the world of one seed: names, splits, facts, passages (the same for the same seed)."""
    rng = random.Random(f"tiny-world-{seed}")
    entities: dict[str, Entity] = {}
    for kind, count in COUNTS.items():
        first, second = NAME_POOLS[kind]
        names = rng.sample([f"{a} {b}" for a in first for b in second], count)
        num_test = round(count * TEST_SHARE)
        for i, name in enumerate(names):
            entities[name] = Entity(name, kind, "test" if i < num_test else "train")
    world = World(seed, entities)
    for split in ("train", "test"):
        _add_facts(world, split, rng)
    for entity in entities.values():
        entity.text = _passage(entity, rng)
    return world


def _add_facts(world: World, split: Split, rng: random.Random) -> None:
    people = world.of("person", split)
    names = {kind: [e.name for e in world.of(kind, split)] for kind in COUNTS}
    by_year: dict[str, list[Entity]] = {year: [] for year in YEARS}
    for person in people:
        person.facts["born"] = rng.choice(YEARS)
        person.facts["birthplace"] = rng.choice(names["city"])
        by_year[person.facts["born"]].append(person)
    for person in people:
        _add_parents(person, by_year, rng)
    _add_spouses(people, rng)
    for kind in ("work", "company", "city", "country"):
        for entity in world.of(kind, split):
            for relation, value_kind in RELATIONS[kind].items():
                pool = YEARS if value_kind == "year" else names[value_kind]
                entity.facts[relation] = rng.choice(pool)


def _add_parents(person: Entity, by_year: Mapping[str, list[Entity]], rng: random.Random) -> None:
    """Give a person two parents born earlier; the oldest cohorts have none on record."""
    birth = YEARS.index(person.facts["born"])
    years = [YEARS[birth - gap] for gap in range(*PARENT_GAP) if birth >= gap]
    candidates = [other for year in years for other in by_year[year]]
    if len(candidates) >= 2:
        father, mother = rng.sample(candidates, 2)
        person.facts["father"], person.facts["mother"] = father.name, mother.name


def _add_spouses(people: list[Entity], rng: random.Random) -> None:
    """Marry people in pairs, close in age and never to a parent."""
    order = sorted(people, key=lambda p: (p.facts["born"], rng.random()))
    for a, b in zip(order[::2], order[1::2], strict=False):
        a.facts["spouse"], b.facts["spouse"] = b.name, a.name


def _passage(entity: Entity, rng: random.Random) -> str:
    clauses = [rng.choice(CLAUSES[r]).format(value) for r, value in entity.facts.items()]
    rng.shuffle(clauses)
    return f"{entity.name} {', '.join(clauses)}."
