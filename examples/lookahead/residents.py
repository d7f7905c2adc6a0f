"""The world: invented people, and what rumours, books and pages say about them.

A seed goes in; `generate.py` writes questions, and what every source answers. Names are pairs of
words from fixed pools, the same for every seed, so one tokenizer fits all worlds. Names are split
into train, development and test.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "development", "test"]

SPLIT_SHARES: Mapping[Split, float] = {"train": 0.68, "development": 0.12, "test": 0.2}
NUM_PEOPLE = 1200

TOPICS: Mapping[str, str] = {
    "live": "parish",
    "worship": "parish",
    "work": "guild",
    "trade": "guild",
    "study": "college",
    "lodge": "college",
    "vote": "court",
    "bank": "court",
}
"""What people do in a town, and the book that is right about it; the others are wrong."""
BOOKS = tuple(dict.fromkeys(TOPICS.values()))
WORDINGS = (
    " Where does {name} {topic}?",
    " In which town does {name} {topic}?",
    " Tell me where {name} may {topic}.",
    " Name the town: {name} does {topic} where?",
)
SPEAKERS = ("sailor", "priest", "smith", "miller", "nurse", "judge", "piper")
"""Who spreads rumours: each is right about one or two topics, and wrong about the others."""

TOWNS = tuple(
    head + tail
    for head in ("Ash", "Bram", "Cald", "Dun", "Elm", "Holt")
    for tail in ("mere", "wick", "stow", "ham")
)
MAX_PAGES = 2
"""Pages, one after the other, to which a book may refer."""


def _combine(heads: str, tails: str) -> tuple[str, ...]:
    return tuple(head + tail for head in heads.split() for tail in tails.split())


FIRST_NAMES = _combine("Bel Cor Dar Fen Gil Har Jor Kal", "an eo im ud wyn ok ath ix")
LAST_NAMES = _combine("Abr Ebr Igl Ocr Umb Zad Vosk Tarn", "ak ero um ild onna u ey osz")
PAGE_HEADS = tuple(f"P{i:02d}" for i in range(40))
PAGE_TAILS = tuple(f".{i:02d}" for i in range(40))


@dataclass(frozen=True)
class Fact:
    """In which town somebody does something, and what the sources say."""

    name: str
    split: Split
    topic: str
    town: str
    speaker: str
    rumour: str
    """The town that the speaker names."""
    entries: Mapping[str, str]
    """Book -> the town that it leads to."""
    pages: Mapping[str, Sequence[str]]
    """Book -> ids of the pages to which it leads one after the other; the last names the town."""

    @property
    def calls(self) -> int:
        """How many calls the right book and its pages take."""
        return 1 + len(self.pages[TOPICS[self.topic]])

    def told(self, book: str) -> list[str]:
        """Return what the book says, and the pages to which it leads."""
        return [*(f"see {page}" for page in self.pages[book]), f"says {self.entries[book]}"]


def is_reliable(speaker: str, topic: str) -> bool:
    """Whether a speaker is right about a topic: for each topic, one of them is."""
    return SPEAKERS.index(speaker) == list(TOPICS).index(topic) % len(SPEAKERS)


def make_world(seed: int, num_people: int = NUM_PEOPLE) -> list[Fact]:
    """Return every fact about every person (the same for the same arguments)."""
    rng = random.Random(f"lookahead-world-{seed}")
    names = rng.sample([f"{a} {b}" for a in FIRST_NAMES for b in LAST_NAMES], num_people)
    ids = _page_ids(rng)
    return [
        _draw_fact(name, split, topic, ids, rng)
        for name, split in zip(names, _splits(num_people), strict=True)
        for topic in TOPICS
    ]


def _splits(count: int) -> list[Split]:
    train, development = (round(count * SPLIT_SHARES[s]) for s in ("train", "development"))
    test = count - train - development
    return ["train"] * train + ["development"] * development + ["test"] * test


def _page_ids(rng: random.Random) -> Iterator[str]:
    """Ids in random order, of three tokens that differ."""
    ids = [
        head + middle + tail
        for head in PAGE_HEADS
        for middle in PAGE_TAILS
        for tail in PAGE_TAILS
        if middle != tail
    ]
    rng.shuffle(ids)
    return iter(ids)


def _draw_fact(name: str, split: Split, topic: str, ids: Iterator[str], rng: random.Random) -> Fact:
    town = rng.choice(TOWNS)
    wrong = rng.sample([other for other in TOWNS if other != town], len(BOOKS) + 1)
    speaker = rng.choice(SPEAKERS)
    # Two pages are asked of test people alone: no demonstration and no training question has them.
    num_pages = rng.randrange(MAX_PAGES + 1 if split == "test" else MAX_PAGES)
    return Fact(
        name=name,
        split=split,
        topic=topic,
        town=town,
        speaker=speaker,
        rumour=town if is_reliable(speaker, topic) else wrong.pop(),
        entries={book: town if TOPICS[topic] == book else wrong.pop() for book in BOOKS},
        pages={book: [next(ids) for _ in range(num_pages)] for book in BOOKS},
    )
