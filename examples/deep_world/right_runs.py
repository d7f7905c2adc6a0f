"""Write right runs about the training questions, for supervised fine-tuning to be compared with.

    python examples/deep_world/right_runs.py --data examples/deep_world/data --seed 0

plays the oracle on every task of `train.jsonl`, with tools that are sometimes unavailable, and
writes `right_1.jsonl`, `right_10.jsonl` and `right_100.jsonl`: 1, 10 and 100 % of its runs. A
smaller file is the beginning of a larger one.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from demonstrations import LookUp, Message, demonstrate
from generate import catalogue, write_lines
from scripted import Oracle

from agent_r1.runtime.files.tasks import read_task_file
from agent_r1_proto.tasks import Task

PERCENTAGES = (1, 10, 100)


def right_runs(tasks: Sequence[Task], look_up: LookUp, seed: int) -> list[list[Message]]:
    """Return the oracle's run about every task, in random order."""
    rng = random.Random(f"deep-world-right-runs-{seed}")
    runs = [demonstrate(str(task.prompt), Oracle(task), look_up, rng) for task in tasks]
    rng.shuffle(runs)
    return runs


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the world's files")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the unavailable calls and the order"
    )
    arguments = parser.parse_args()
    tasks = read_task_file(arguments.data / "train.jsonl")
    runs = right_runs(tasks, catalogue(arguments.data), arguments.seed)
    for percentage in PERCENTAGES:
        count = max(1, len(runs) * percentage // 100)
        file = arguments.data / f"right_{percentage}.jsonl"
        write_lines(file, ({"messages": messages} for messages in runs[:count]))


if __name__ == "__main__":
    main()
