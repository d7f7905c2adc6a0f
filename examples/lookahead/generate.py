"""Write a world of one seed to a folder: what the sources say, questions, demonstrations.

    python examples/lookahead/generate.py --seed 0 --out examples/lookahead/data

reads nothing and writes `rumours.jsonl`, `register.jsonl` and `pages.jsonl` (what the tools
answer), `train.jsonl` and `eval_<set>.jsonl` (tasks) and `sft.jsonl` (demonstrations for
`agent-r1 sft`). The same seed gives the same bytes.
"""

import argparse
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from demonstrations import Hasty, LookUp, demonstrate
from residents import NUM_PEOPLE, WORDINGS, Fact, Split, make_world
from sources import Page, Register, Rumour, Said

from agent_r1.learner.sft.data import Demonstration
from agent_r1.runtime.files.published_data import write_lines
from agent_r1_proto.tasks import Task

NUM_TRAIN = 4000
NUM_EVAL = 400
NUM_DEMOS = 20000


@dataclass(frozen=True)
class QuestionSet:
    """Which questions a file has."""

    split: Split
    calls: tuple[int, ...] = (1, 2)
    """How many calls questions need, every number as often as the others."""


SETS: Mapping[str, QuestionSet] = {
    "in_domain": QuestionSet("test"),
    "longer": QuestionSet("test", calls=(3,)),
    "development": QuestionSet("development"),
}


def write_sources(facts: Iterable[Fact], out: Path) -> None:
    """Write what the tools answer."""
    rumours: list[Said] = []
    register: list[Said] = []
    pages: list[Said] = []
    for fact in facts:
        asked = f"{fact.name} {fact.topic}"
        rumours.append(Said(key=asked, text=f" {fact.speaker} says {fact.rumour}"))
        for book in fact.entries:
            first, *others = fact.told(book)
            register.append(Said(key=f"{book} {asked}", text=f" {book} {first}"))
            turned = zip(fact.pages[book], others, strict=True)
            pages += (Said(key=page, text=f" page {text}") for page, text in turned)
    for name, lines in (("rumours", rumours), ("register", register), ("pages", pages)):
        write_lines(out / f"{name}.jsonl", lines)


def open_sources(folder: Path) -> LookUp:
    """Return what calls the tools over the files of a world."""
    tools = {tool.name: tool(str(folder.resolve())) for tool in (Rumour, Register, Page)}
    for tool in tools.values():
        tool.load()
    return lambda name, arguments: tools[name].look_up(arguments)


def make_task(fact: Fact, wording: int, name: str, number: int) -> Task:
    """Return the question about a fact: with its calls, and what the oracle needs to know."""
    asked = WORDINGS[wording].format(name=fact.name, topic=fact.topic)
    return Task(
        id=f"{name}-{number:05d}",
        prompt=f"{asked} Use {fact.calls} {'call' if fact.calls == 1 else 'calls'}.",
        payload={
            "answers": [fact.town],
            "calls": fact.calls,
            "plan": {"name": fact.name, "topic": fact.topic, "wording": wording},
        },
        metadata={"set": name, "type": fact.topic, "hops": fact.calls},
    )


def make_tasks(
    facts: Sequence[Fact], asked: QuestionSet, count: int, name: str, rng: random.Random
) -> list[Task]:
    """Return the tasks of one file, about as many different facts, in random order."""
    own = [fact for fact in facts if fact.split == asked.split]
    chosen: list[Fact] = []
    for calls in asked.calls:
        fitting = [fact for fact in own if fact.calls == calls]
        chosen += rng.sample(fitting, count // len(asked.calls))
    rng.shuffle(chosen)
    return [make_task(f, rng.randrange(len(WORDINGS)), name, i) for i, f in enumerate(chosen)]


def make_demonstrations(
    facts: Sequence[Fact], look_up: LookUp, count: int, rng: random.Random
) -> Iterator[Demonstration]:
    """Yield runs about the facts of train people; the same fact may come in several wordings."""
    own = [fact for fact in facts if fact.split == "train"]
    for number in range(count):
        task = make_task(rng.choice(own), rng.randrange(len(WORDINGS)), "demo", number)
        yield Demonstration(messages=demonstrate(task, Hasty(task, rng), look_up))


def write_world(
    seed: int,
    out: Path,
    *,
    num_people: int = NUM_PEOPLE,
    num_train: int = NUM_TRAIN,
    num_eval: int = NUM_EVAL,
    num_demos: int = NUM_DEMOS,
) -> None:
    """Write all files of one seed to the folder `out`."""
    facts = make_world(seed, num_people)
    write_sources(facts, out)
    rng = random.Random(f"lookahead-questions-{seed}")
    for name, asked in SETS.items():
        write_lines(out / f"eval_{name}.jsonl", make_tasks(facts, asked, num_eval, name, rng))
    tasks = make_tasks(facts, QuestionSet("train"), num_train, "train", rng)
    write_lines(out / "train.jsonl", tasks)
    if num_demos:
        rng = random.Random(f"lookahead-demonstrations-{seed}")
        look_up = open_sources(out)
        write_lines(out / "sft.jsonl", make_demonstrations(facts, look_up, num_demos, rng))


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="world seed")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--no-sft", action="store_true", help="leave out the demonstrations")
    arguments = parser.parse_args()
    write_world(arguments.seed, arguments.out, num_demos=0 if arguments.no_sft else NUM_DEMOS)


if __name__ == "__main__":
    main()
