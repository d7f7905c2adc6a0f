"""Write the exercises of one seed to a folder, and demonstrations.

    python examples/tiny_code/generate.py --seed 0 --out examples/tiny_code/data

writes `train.jsonl` and `eval_<set>.jsonl` (tasks), `sft.jsonl` (demonstrations with mistakes, for
the base model), and `repair.jsonl` and `repair_silent.jsonl` (tasks that begin after a wrong first
program, with the tool's answer and without its reason). The same seed gives the same bytes.
"""

import argparse
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from demonstrations import Careless, answer, demonstrate
from exercises import SETS, TRAINED, Exercise, make_exercises
from operations import program
from programmers import call_text
from trials import FAILED, PASSED

from agent_r1.learner.sft.data import Demonstration
from agent_r1.runtime.files.published_data import write_lines
from agent_r1_proto.tasks import ChatMessage, Task

NUM_TRAIN = 4000
NUM_EVAL = 300
NUM_REPAIR = 200
NUM_DEMOS = 12000


def make_task(exercise: Exercise, name: str, prompt: str | Sequence[ChatMessage] = "") -> Task:
    """Return an exercise as a task; `prompt` is a dialogue that it begins with."""
    operations = [operation.text for operation in exercise.operations]
    return Task(
        id=name,
        prompt=list(prompt) if prompt else exercise.text,
        payload={"operations": operations, "form": exercise.form.name},
        tool_context=exercise.trial.model_dump(),
        metadata={
            "set": name.rpartition("-")[0],
            "type": exercise.form.name,
            "hops": len(operations),
        },
    )


def make_tasks(exercises: Iterable[Exercise], name: str) -> list[Task]:
    """Return exercises as tasks."""
    return [make_task(exercise, f"{name}-{i:05d}") for i, exercise in enumerate(exercises)]


def write_repairs(out: Path, count: int, rng: random.Random) -> None:
    """Write wrong first programs for the reported compositions, twice: with errors and without."""
    told: list[Task] = []
    silent: list[Task] = []
    while len(told) < count:
        (exercise,) = make_exercises(SETS["compositions"], 1, rng)
        code = program(Careless(exercise, rng).first())
        shown, _ = answer(exercise, code)
        if shown != PASSED:
            for name, tasks, said in (("repair", told, shown), ("silent", silent, FAILED)):
                dialogue = [
                    ChatMessage(role="user", content=exercise.text),
                    ChatMessage(role="assistant", content=call_text(code)),
                    ChatMessage(role="tool", content=said),
                ]
                tasks.append(make_task(exercise, f"{name}-{len(tasks):05d}", dialogue))
    write_lines(out / "repair.jsonl", told)
    write_lines(out / "repair_silent.jsonl", silent)


def write_exercises(
    seed: int,
    out: Path,
    *,
    num_train: int = NUM_TRAIN,
    num_eval: int = NUM_EVAL,
    num_repair: int = NUM_REPAIR,
    num_demos: int = NUM_DEMOS,
) -> None:
    """Write all files of one seed to the folder `out`."""
    rng = random.Random(f"tiny-code-exercises-{seed}")
    for name, exercises in SETS.items():
        tasks = make_tasks(make_exercises(exercises, num_eval, rng), name)
        write_lines(out / f"eval_{name}.jsonl", tasks)
    tasks = make_tasks(make_exercises(TRAINED, num_train, rng), "train")
    write_lines(out / "train.jsonl", tasks)
    write_repairs(out, num_repair, random.Random(f"tiny-code-repairs-{seed}"))
    rng = random.Random(f"tiny-code-demonstrations-{seed}")
    demos = (demonstrate(one, rng) for one in make_exercises(TRAINED, num_demos, rng))
    write_lines(out / "sft.jsonl", (Demonstration(messages=messages) for messages in demos))


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the exercises")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    write_exercises(arguments.seed, arguments.out)


if __name__ == "__main__":
    main()
