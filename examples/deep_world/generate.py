"""Write a world of one seed to a folder: catalogue, questions, demonstrations.

    python examples/deep_world/generate.py --seed 0 --out examples/deep_world/data

reads nothing and writes `corpus.jsonl` (the search tool indexes it), `entries.jsonl` (the read
tool's), `train.jsonl`, `unlabelled.jsonl` and `eval_<set>.jsonl` (tasks) and `sft.jsonl`
(demonstrations for `agent-r1 sft`). The same seed gives the same bytes.
"""

import argparse
import json
import random
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from catalogue import CatalogueRead, CatalogueSearch
from demonstrations import Careless, LookUp, comparison_drill, demonstrate, play, recital
from questions import (
    DEMONSTRATED,
    RECITED,
    SETS,
    TRAINED,
    WORDINGS,
    Question,
    QuestionSet,
    comparison,
    make_questions,
)
from scripted import Oracle
from world import NUM_NAMES, World, make_world

from agent_r1_proto.tasks import Task

NUM_TRAIN = 4000
NUM_EVAL = 400
NUM_DEMOS = 28000
NUM_DRILLS = 6000
"""Of each kind: comparisons and recitals."""
SLACK_SHARES = {0: 0.5, 1: 0.3, 2: 0.2}
"""Calls that a budget allows beyond those that are needed, and how often."""


def catalogue(folder: Path) -> LookUp:
    """Open both tools over the files of a world; they are never unavailable."""
    search, read = CatalogueSearch(str(folder.resolve())), CatalogueRead(str(folder.resolve()))
    search.load()
    read.load()
    tools = {"search": cache(search.look_up), "read": read.look_up}
    return lambda tool, value: tools[tool](value)


def make_task(question: Question, name: str, look_up: LookUp, rng: random.Random) -> Task:
    """Return a question as a task: with its budget, and what the oracle needs to know."""
    plan = {
        "starts": list(question.starts),
        "relations": list(question.relations),
        "order": question.order,
    }
    payload: dict[str, Any] = {"answers": [question.answer], "type": question.type, "plan": plan}
    oracle = Oracle(Task(id="plan", prompt=question.text, payload=payload))
    texts, needed = play(oracle, look_up)
    assert f"<answer> {question.answer}</answer>" in texts[-1], texts
    slack = rng.choices(list(SLACK_SHARES), list(SLACK_SHARES.values()))[0]
    return Task(
        id=name,
        prompt=f"{question.text} Use {needed + slack} calls.",
        payload=payload | {"budget": needed + slack, "facts": list(oracle.facts)},
        metadata={"type": question.type, "hops": question.hops},
    )


def make_tasks(
    world: World, questions: QuestionSet, count: int, name: str, look_up: LookUp, rng: random.Random
) -> list[Task]:
    """Return the tasks of one file."""
    made = make_questions(world, questions, count, rng)
    tasks = [make_task(q, f"{name}-{i:05d}", look_up, rng) for i, q in enumerate(made)]
    return [t.model_copy(update={"metadata": {"set": name, **t.metadata}}) for t in tasks]


def make_demonstrations(
    world: World, look_up: LookUp, rng: random.Random, num_demos: int, num_drills: int
) -> list[dict[str, Any]]:
    """Return demonstrations over the train people, in random order."""
    demonstrated = QuestionSet(DEMONSTRATED, "train")
    tasks = make_tasks(world, demonstrated, num_demos, "demo", look_up, rng)
    dialogues = [demonstrate(str(t.prompt), Careless(t, rng), look_up, rng) for t in tasks]
    compared = make_questions(world, QuestionSet({comparison: 1.0}, "train"), 2000, rng)
    years = {name: person.facts["born"] for name, person in world.people.items()}
    dialogues += [comparison_drill(rng.choice(compared), years) for _ in range(num_drills)]
    recited = make_questions(world, QuestionSet(RECITED, "train"), num_drills, rng)
    dialogues += map(recital, recited)
    rng.shuffle(dialogues)
    return [{"messages": messages} for messages in dialogues]


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def write_tasks(path: Path, tasks: Iterable[Task]) -> None:
    """Write a task file."""
    keys = {"id", "prompt", "payload", "metadata"}
    write_lines(path, (task.model_dump(mode="json", include=keys) for task in tasks))


def write_world(
    seed: int,
    out: Path,
    *,
    num_names: int = NUM_NAMES,
    num_train: int = NUM_TRAIN,
    num_eval: int = NUM_EVAL,
    num_demos: int = NUM_DEMOS,
    num_drills: int = NUM_DRILLS,
) -> None:
    """Write all files of one seed to the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    world = make_world(seed, num_names)
    write_lines(out / "corpus.jsonl", (entry.passage for entry in world.entries))
    write_lines(out / "entries.jsonl", ({"id": e.id, "text": e.text} for e in world.entries))
    look_up = catalogue(out)
    rng = random.Random(f"deep-world-questions-{seed}")
    train = QuestionSet(TRAINED, "train", WORDINGS)
    write_tasks(out / "train.jsonl", make_tasks(world, train, num_train, "train", look_up, rng))
    for name, questions in SETS.items():
        tasks = make_tasks(world, questions, num_eval, name, look_up, rng)
        write_tasks(out / f"eval_{name}.jsonl", tasks)
    rng = random.Random(f"deep-world-unlabelled-{seed}")
    others = QuestionSet(TRAINED, "dev", WORDINGS)
    tasks = make_tasks(world, others, num_train // 2, "unlabelled", look_up, rng)
    write_tasks(out / "unlabelled.jsonl", tasks)
    if num_demos:
        rng = random.Random(f"deep-world-demonstrations-{seed}")
        lines = make_demonstrations(world, look_up, rng, num_demos, num_drills)
        write_lines(out / "sft.jsonl", lines)


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
