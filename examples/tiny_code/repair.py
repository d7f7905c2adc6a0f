"""Say how many wrong programs each agent repairs, and what its first programs are worth.

    python examples/tiny_code/repair.py runs/tiny_code/repair

reads the answers that `repair.sh` has asked for, writes `repair.json` to docs/results/tiny_code,
and prints a table.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from agent_r1.evaluation.answer_file import read_answers
from agent_r1.evaluation.experiments.estimates import bootstrap_seeds
from agent_r1.evaluation.experiments.findings import interval
from agent_r1.evaluation.statistics import Estimate

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "tiny_code"
MEASURE = "trials:all_tests_passed"
SETS = ("repair", "repair_silent", "in_domain", "compositions")
AGENTS = {
    "base": ("base",),
    "grpo": tuple(f"grpo_seed{seed}" for seed in range(3)),
    "grpo_silent": tuple(f"grpo_silent_seed{seed}" for seed in range(3)),
}
"""The files of an agent, one a seed."""


def scores(file: Path) -> dict[str, list[float | None]]:
    """Return what each answer of a file scored, by set; None where it failed.

    Answers are stored as they come. In the order of the exercises, those of all seeds are paired.
    """
    answers = sorted(read_answers(file), key=lambda answer: answer.key)
    return {
        name: [
            None if answer.failed else answer.components[MEASURE]
            for answer in answers
            if answer.set == name
        ]
        for name in SETS
    }


def estimates(folder: Path) -> dict[str, dict[str, Estimate]]:
    """Return the score of each agent and set, with intervals over seeds and questions.

    Raises:
        ValueError: an agent has not been asked, or has no answer of a set.
    """
    found: dict[str, dict[str, Estimate]] = {}
    for agent, names in AGENTS.items():
        of_seeds = [scores(folder / f"{name}.jsonl") for name in names]
        found[agent] = {one: bootstrap_seeds([[s[one] for s in of_seeds]]) for one in SETS}
    return found


def main() -> None:
    """Parse the command line, write the file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("answers", type=Path, help="folder of the answers")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    arguments = parser.parse_args()
    try:
        found = estimates(arguments.answers)
    except ValueError as exc:
        parser.error(f"{exc}; `sh examples/tiny_code/repair.sh` asks what is missing")
    report = {agent: {name: asdict(e) for name, e in row.items()} for agent, row in found.items()}
    arguments.results.mkdir(parents=True, exist_ok=True)
    file = arguments.results / "repair.json"
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"| all hidden tests passed | {' | '.join(SETS)} |")
    print("|---" * (len(SETS) + 1) + "|")
    for agent, row in found.items():
        print(f"| {agent} | {' | '.join(interval(row[name]) for name in SETS)} |")


if __name__ == "__main__":
    main()
