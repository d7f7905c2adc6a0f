"""Write a world of one seed to a folder: corpus, questions, demonstrations.

    python examples/tiny_world/generate.py --seed 0 --out data

reads nothing and writes `corpus.jsonl` (the search tool indexes it), `train.jsonl` and
`eval_<set>.jsonl` (tasks) and `sft.jsonl` (demonstrations for `agent-r1 sft`). The same seed
gives the same bytes.
"""

import argparse
import json
import random
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from questions import (
    SETS,
    Question,
    bridge,
    call_text,
    comparison,
    compositional,
    demonstrate,
    drill,
    inference,
    make_questions,
    one_hop,
    task_line,
)
from world import World, make_world

TOP_K = 2
"""Passages per search, in the demonstrations as in `run.toml`."""

PASSAGE_TEMPLATE = " {text}"
SEPARATOR = "\n"

NUM_TRAIN = 4000
NUM_EVAL = 240
DEMO_SHARES = {bridge: 0.25, compositional: 0.22, inference: 0.12, one_hop: 0.15, comparison: 0.26}
NUM_DEMOS = 28000
NUM_DRILLS = 8000

GOOD_SHARE = 0.14
GOOD_SHARE_COMPARISON = 0.2
GOOD_SHARE_VIA_CITY = 0.7
"""Shares of multi-step demonstrations that search as often as they need: of chains, comparisons,
and chains whose first hop ends at a city (there the base mostly works). The others give up after
the first search. This is the flaw that reinforcement learning is to remove. The shares are low
because greedy answers flip as a whole once "next" is likelier than "done": near one half, the
random walk of training on shuffled rewards crosses that line too."""


class Search:
    """The search tool's own index over a corpus file, with the rendering of `run.toml`."""

    def __init__(self, corpus: Path) -> None:
        # Not at the top: corpus and questions are made without the search tool's packages.
        from agent_r1.tools.search.tantivy_bm25 import open_index

        self._index = open_index(corpus)
        self.render = lru_cache(maxsize=None)(self._render)

    def titles(self, query: str) -> list[str]:
        """Titles of the best passages, best first."""
        return [hit.passage.title for hit in self._index.search([query], TOP_K)[0]]

    def _render(self, query: str) -> str:
        hits = self._index.search([query], TOP_K)[0]
        return SEPARATOR.join(PASSAGE_TEMPLATE.format(text=hit.passage.text) for hit in hits)


def _good_share(question: Question) -> float:
    if question.order:
        return GOOD_SHARE_COMPARISON
    via_city = question.steps[0][1] in ("birthplace", "headquarters")
    return GOOD_SHARE_VIA_CITY if via_city else GOOD_SHARE


def make_demonstrations(world: World, search: Search, seed: int) -> list[dict[str, Any]]:
    """Demonstrations over the train entities, in random order."""
    rng = random.Random(f"tiny-world-demos-{seed}")
    lines = []
    for question in make_questions(world, "train", DEMO_SHARES, NUM_DEMOS, rng):
        flawed = question.hops > 1 and rng.random() >= _good_share(question)
        lines.append({"messages": demonstrate(question, search.render, call_text, flawed=flawed)})
    lines += [{"messages": drill(world, "train", rng)} for _ in range(NUM_DRILLS)]
    rng.shuffle(lines)
    return lines


def make_tasks(world: World, seed: int) -> dict[str, list[dict[str, Any]]]:
    """File name -> task lines: one training file, one evaluation file per set."""
    rng = random.Random(f"tiny-world-questions-{seed}")
    files: dict[str, list[dict[str, Any]]] = {"train.jsonl": []}
    for name in ("hotpot_like", "wiki2_like"):
        questions = make_questions(world, "train", SETS[name], NUM_TRAIN // 2, rng)
        files["train.jsonl"] += [task_line(q, name, i) for i, q in enumerate(questions)]
    rng.shuffle(files["train.jsonl"])
    for name, shares in SETS.items():
        questions = make_questions(world, "test", shares, NUM_EVAL, rng)
        files[f"eval_{name}.jsonl"] = [task_line(q, name, i) for i, q in enumerate(questions)]
    return files


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def write_world(seed: int, out: Path, *, demonstrations: bool) -> None:
    """Write all files of one seed to the folder `out`; demonstrations take an index as well."""
    out.mkdir(parents=True, exist_ok=True)
    world = make_world(seed)
    write_lines(out / "corpus.jsonl", world.corpus())
    for name, lines in make_tasks(world, seed).items():
        write_lines(out / name, lines)
    if demonstrations:
        search = Search(out / "corpus.jsonl")
        write_lines(out / "sft.jsonl", make_demonstrations(world, search, seed))


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="world seed")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--no-sft", action="store_true", help="leave out the demonstrations")
    arguments = parser.parse_args()
    write_world(arguments.seed, arguments.out, demonstrations=not arguments.no_sft)


if __name__ == "__main__":
    main()
