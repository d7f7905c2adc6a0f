"""Write the problems of one seed to a folder, and demonstrations.

    python examples/tiny_math/generate.py --seed 0 --out examples/tiny_math/data

writes `train.jsonl` and `eval_<set>.jsonl` (tasks), `sft.jsonl` (demonstrations with mistakes, for
the base model) and `correct.jsonl` (demonstrations without, of the training problems). The same
seed gives the same bytes.
"""

import argparse
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from demonstrations import Careless, demonstrate
from problems import COMBINATIONS, SETS, TRAINED, Problem, ProblemSet, make_problems
from solvers import Oracle

from agent_r1.learner.sft.data import Demonstration
from agent_r1.runtime.files.published_data import write_lines
from agent_r1_proto.tasks import Task

NUM_TRAIN = 4000
NUM_EVAL = 300
NUM_DEMOS = 24000


def plan_of(problem: Problem) -> list[dict[str, str]]:
    """Return what the oracle needs to know: the clauses without their results."""
    plan: list[dict[str, str]] = []
    for chain in problem.chains:
        after = ""
        for step in chain.steps:
            expression = step.operation.expression.format(v="{v}", s="{s}", n=step.number)
            plan.append(
                {
                    "name": chain.name,
                    "kind": step.operation.kind,
                    "after": after,
                    "text": step.text,
                    "expression": expression,
                    "start": str(chain.start),
                }
            )
            after = step.operation.kind
    if kind := problem.combination:
        fields = {"name": "", "kind": kind, "after": "", "text": kind, "start": ""}
        plan.append({**fields, "expression": COMBINATIONS[kind]})
    return plan


def make_tasks(problems: Iterable[Problem], name: str) -> list[Task]:
    """Return problems as tasks."""
    tasks: list[Task] = []
    for i, problem in enumerate(problems):
        payload: dict[str, Any] = {"answers": [str(problem.answer)], "plan": plan_of(problem)}
        tasks.append(
            Task(
                id=f"{name}-{i:05d}",
                prompt=problem.text,
                payload=payload,
                metadata={"set": name, "type": problem.type, "hops": len(payload["plan"])},
            )
        )
    return tasks


def write_dialogues(path: Path, tasks: Iterable[Task], rng: random.Random | None) -> None:
    """Write a run for every task that has one; with mistakes where `rng` is given."""
    agents = ((task, Oracle(task) if rng is None else Careless(task, rng)) for task in tasks)
    dialogues = (demonstrate(task, agent) for task, agent in agents)
    write_lines(path, (Demonstration(messages=messages) for messages in dialogues if messages))


def write_problems(
    seed: int,
    out: Path,
    *,
    num_train: int = NUM_TRAIN,
    num_eval: int = NUM_EVAL,
    num_demos: int = NUM_DEMOS,
) -> None:
    """Write all files of one seed to the folder `out`."""
    seen: set[str] = set()
    rng = random.Random(f"tiny-math-problems-{seed}")
    for name, problems in SETS.items():
        tasks = make_tasks(make_problems(problems, num_eval, rng, seen), name)
        write_lines(out / f"eval_{name}.jsonl", tasks)
    trained = ProblemSet(TRAINED)
    tasks = make_tasks(make_problems(trained, num_train, rng, seen), "train")
    write_lines(out / "train.jsonl", tasks)
    write_dialogues(out / "correct.jsonl", tasks, None)
    rng = random.Random(f"tiny-math-demonstrations-{seed}")
    demos = make_tasks(make_problems(trained, num_demos, rng, seen), "demo")
    write_dialogues(out / "sft.jsonl", demos, rng)


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    write_problems(arguments.seed, arguments.out)


if __name__ == "__main__":
    main()
