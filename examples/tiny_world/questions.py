"""Questions about a world, and the demonstrations a base model is warmed up with.

Reads a `World`; `generate.py` writes the questions to `train.jsonl` and `eval_*.jsonl` and the
demonstrations to `sft.jsonl`. Every question but a 1-hop one needs two or more passages:

- hotpot_like: `bridge` ("Where was the author of W born?") and `comparison`
- wiki2_like: `compositional` ("Name the R2 of the R1 of E."), `inference` ("Who is the
  father-in-law of P?", a relation no passage names) and `comparison`
- musique_like: `three_hop`, out of domain: no demonstration and no training question has 3 hops

A demonstration is an agent at work: it writes a plan, searches, notes what it found, and decides
between "next" (search on) and "done" (answer). A flawed one says "done" after its first search.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from world import RELATIONS, Entity, Split, World

Message = dict[str, str]

NOUNS: Mapping[str, tuple[str, ...]] = {
    "author": ("author", "writer"),
    "founder": ("founder", "creator"),
    "headquarters": ("headquarters", "seat"),
    "spouse": ("spouse", "partner"),
    "father": ("father",),
    "mother": ("mother",),
    "birthplace": ("birthplace", "hometown"),
    "born": ("birth year",),
    "country": ("country",),
    "mayor": ("mayor",),
    "capital": ("capital",),
    "published": ("publication year",),
    "founded": ("founding year",),
}
"""Relation -> nouns a question uses for it."""

BRIDGE_FORMS: Mapping[str, tuple[str, ...]] = {
    "spouse": ("Who is married to {}?", "To whom is {} married?"),
    "father": ("Which man is the father of {}?",),
    "mother": ("Which woman is the mother of {}?",),
    "birthplace": ("Where was {} born?", "In which city was {} born?"),
    "born": ("When was {} born?", "In which year was {} born?"),
    "country": ("In which country is {}?",),
    "mayor": ("Who governs {}?",),
}
"""Last relation -> questions about the bridge entity `{}`."""

BRIDGE_STARTS = {"work": ("author",), "company": ("founder", "headquarters")}
DIRECT_FORMS = ("Name the {}.", "What is the {}?", "Tell me the {}.")

INFERENCES: Mapping[str, tuple[str, str]] = {
    "father-in-law": ("spouse", "father"),
    "mother-in-law": ("spouse", "mother"),
    "maternal grandfather": ("mother", "father"),
    "paternal grandmother": ("father", "mother"),
}
"""Kinship word -> the two facts it follows from."""

COMPARISONS: Mapping[str, tuple[str, str]] = {
    "person": ("born", "Who was born {order}, {a} or {b}?"),
    "work": ("published", "Which was published {order}, {a} or {b}?"),
    "company": ("founded", "Which was founded {order}, {a} or {b}?"),
    "country": ("founded", "Which was founded {order}, {a} or {b}?"),
}
"""Kind -> the year compared and the question."""

ORDERS = ("earlier", "later")

SPOKEN_TEXT = "\n".join(
    [
        *(noun for nouns in NOUNS.values() for noun in nouns),
        *(form for forms in BRIDGE_FORMS.values() for form in forms),
        *DIRECT_FORMS,
        *INFERENCES,
        *NOUNS,
        *(form for _, form in COMPARISONS.values()),
        *ORDERS,
        "of the a",
        "plan compare and by is next done",
    ]
)
"""All wording of questions and thoughts, for the tokenizer's vocabulary."""


@dataclass(frozen=True)
class Question:
    """One question with its answer and the way to it."""

    text: str
    answer: str
    type: str
    hops: int
    steps: tuple[tuple[str, str, str], ...]
    """(entity, relation, value) facts that lead to the answer, in search order."""
    order: str = ""
    """`earlier` or `later` for a comparison, else empty."""


def chain_question(world: World, start: Entity, relations: Sequence[str]) -> list[str] | None:
    """Values of a chain that makes a fair question: none repeats and all facts exist."""
    values = world.follow(start.name, relations)
    if values is None or len({start.name, *values}) != len(values) + 1:
        return None
    return values


def _chain(
    text: str, kind: str, start: str, relations: Sequence[str], values: list[str]
) -> Question:
    steps = tuple(zip([start, *values[:-1]], relations, values, strict=True))
    return Question(text, values[-1], kind, len(relations), steps)


def _noun_phrase(relations: Sequence[str], start: str, rng: random.Random) -> str:
    phrase = start
    for relation in relations:
        phrase = f"{rng.choice(NOUNS[relation])} of {phrase}"
        phrase = phrase if relation == relations[-1] else f"the {phrase}"
    return phrase


def _random_chain(rng: random.Random, kind: str, hops: int) -> list[str] | None:
    """A path of `hops` relations from `kind`; None if it repeats one or leaves the entities."""
    relations: list[str] = []
    for _ in range(hops):
        if kind not in RELATIONS:
            return None
        relation = rng.choice(list(RELATIONS[kind]))
        if relation in relations:
            return None
        relations.append(relation)
        kind = RELATIONS[kind][relation]
    return relations


def bridge(world: World, split: Split, rng: random.Random) -> Question | None:
    """A 2-hop question over an entity that the question does not name."""
    kind = rng.choice(list(BRIDGE_STARTS))
    start = rng.choice(world.of(kind, split))
    first = rng.choice(BRIDGE_STARTS[kind])
    last = rng.choice([r for r in BRIDGE_FORMS if r in RELATIONS[RELATIONS[kind][first]]])
    values = chain_question(world, start, (first, last))
    if values is None:
        return None
    text = rng.choice(BRIDGE_FORMS[last]).format(f"the {_noun_phrase([first], start.name, rng)}")
    return _chain(text, "bridge", start.name, (first, last), values)


def direct(
    world: World, split: Split, rng: random.Random, *, hops: int, name: str
) -> Question | None:
    """A question that spells out its chain of `hops` relations."""
    kind = rng.choice(["person", "person", "work", "company", "city"])
    relations = _random_chain(rng, kind, hops)
    if relations is None:
        return None
    start = rng.choice(world.of(kind, split))
    values = chain_question(world, start, relations)
    if values is None:
        return None
    text = rng.choice(DIRECT_FORMS).format(_noun_phrase(relations, start.name, rng))
    return _chain(text, name, start.name, relations, values)


def inference(world: World, split: Split, rng: random.Random) -> Question | None:
    """A 2-hop question about a relation that no passage names."""
    word = rng.choice(list(INFERENCES))
    start = rng.choice(world.of("person", split))
    values = chain_question(world, start, INFERENCES[word])
    if values is None:
        return None
    text = rng.choice(DIRECT_FORMS).format(f"{word} of {start.name}")
    return _chain(text, "inference", start.name, INFERENCES[word], values)


def comparison(world: World, split: Split, rng: random.Random) -> Question | None:
    """Which of two entities has the earlier or the later year."""
    kind = rng.choice(list(COMPARISONS))
    relation, form = COMPARISONS[kind]
    a, b = rng.sample(world.of(kind, split), 2)
    if a.facts[relation] == b.facts[relation]:
        return None
    order = rng.choice(ORDERS)
    pick = min if order == "earlier" else max
    answer = pick(a, b, key=lambda e: int(e.facts[relation])).name
    steps = tuple((e.name, relation, e.facts[relation]) for e in (a, b))
    text = form.format(order=order, a=a.name, b=b.name)
    return Question(text, answer, "comparison", 2, steps, order)


Maker = Callable[[World, Split, random.Random], Question | None]


def compositional(world: World, split: Split, rng: random.Random) -> Question | None:
    """A 2-hop question that spells out both relations."""
    return direct(world, split, rng, hops=2, name="compositional")


def three_hop(world: World, split: Split, rng: random.Random) -> Question | None:
    """A 3-hop question in the grammar of `compositional`: one more trained relation."""
    return direct(world, split, rng, hops=3, name="three_hop")


def one_hop(world: World, split: Split, rng: random.Random) -> Question | None:
    """A question that one passage answers (demonstrations only)."""
    return direct(world, split, rng, hops=1, name="one_hop")


SETS: Mapping[str, Mapping[Maker, float]] = {
    "hotpot_like": {bridge: 0.75, comparison: 0.25},
    "wiki2_like": {compositional: 0.5, inference: 0.25, comparison: 0.25},
    "musique_like": {three_hop: 1.0},
}
"""Set -> shares of its question types."""


def make_questions(
    world: World, split: Split, shares: Mapping[Maker, float], count: int, rng: random.Random
) -> list[Question]:
    """Sample `count` different questions with the given shares of types, in random order."""
    questions: dict[str, Question] = {}
    for maker, share in shares.items():
        wanted = len(questions) + round(count * share)
        while len(questions) < wanted:
            question = maker(world, split, rng)
            if question is not None:
                questions.setdefault(question.text, question)
    result = list(questions.values())
    rng.shuffle(result)
    return result


def _note(question: Question, i: int) -> str:
    entity, relation, value = question.steps[i]
    if question.order:
        return f" {value} {entity}."
    return f" {relation} is {value}."


def _plan(question: Question) -> str:
    if question.order:
        a, b = (entity for entity, _, _ in question.steps)
        return f" compare {a} and {b} by {question.steps[0][1]}."
    return f" plan {question.steps[0][0]} {' '.join(r for _, r, _ in question.steps)}."


def _conclusion(question: Question) -> str:
    if not question.order:
        return ""
    value = next(v for e, _, v in question.steps if e == question.answer)
    return f" {question.order} {value} {question.answer}."


def _hasty_answer(question: Question) -> str:
    """What a flawed demonstration answers after one search: what it has in hand."""
    return question.steps[0][0] if question.order else question.steps[0][2]


def call_text(query: str) -> str:
    """The tool call for one search, compact Hermes JSON; tokenizer.MARKERS hold its scaffolding."""
    arguments = {"name": "search", "arguments": {"query": query}}
    return f"<tool_call>{json.dumps(arguments, separators=(',', ':'))}</tool_call>"


def demonstrate(
    question: Question,
    search: Callable[[str], str],
    call_text: Callable[[str], str],
    *,
    flawed: bool,
) -> list[Message]:
    """Chat messages of one agent run; `flawed` answers after the first search."""
    messages: list[Message] = [{"role": "user", "content": question.text}]
    thought = _plan(question)
    for i, (entity, relation, _) in enumerate(question.steps):
        query = f" {entity} {relation}"
        call = f"<think>{thought}</think>{call_text(query)}"
        messages.append({"role": "assistant", "content": call})
        messages.append({"role": "tool", "content": search(query)})
        thought = _note(question, i)
        if i + 1 < len(question.steps):
            if flawed:
                break
            upcoming = question.steps[i + 1]
            thought += f" next {upcoming[0] if question.order else upcoming[1]}."
    answer = _hasty_answer(question) if flawed else question.answer
    thought += " done." if flawed else f"{_conclusion(question)} done."
    final = f"<think>{thought}</think><answer> {answer}</answer>"
    messages.append({"role": "assistant", "content": final})
    return messages


def drill(world: World, split: Split, rng: random.Random) -> list[Message]:
    """A comparison whose two facts stand in the question: it is answered without a search."""
    question = None
    while question is None:
        question = comparison(world, split, rng)
    notes = "".join(_note(question, i) for i in range(2))
    final = f"<think>{_conclusion(question)} done.</think><answer> {question.answer}</answer>"
    return [
        {"role": "user", "content": f"Which is {question.order}?{notes}"},
        {"role": "assistant", "content": final},
    ]


def task_line(question: Question, set_name: str, index: int) -> dict[str, Any]:
    """The question as one line of a task file."""
    return {
        "id": f"{set_name}-{index:05d}",
        "prompt": question.text,
        "payload": {"answers": [question.answer], "type": question.type},
        "metadata": {"set": set_name, "type": question.type, "hops": question.hops},
    }
