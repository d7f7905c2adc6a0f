"""Seconds of a training step with every trajectory stored, and with none: runs by turns.

    make bench CASE=storage ARGS="--model tiny --steps 20 --pairs 3"

Trains tiny_world as benchmarks/run.py does, without evaluation and checkpoints. A figure is the
median over the steps of a run but the first.
"""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.harness import OUT, ROOT, alternate, compare, read_options, write_report
from benchmarks.processes import NO_EVALUATION, make_world, read_json_lines
from benchmarks.run import settings_of, train


def step_s(settings: dict[str, object], stored: object) -> float:
    """Train, and return the seconds of a step."""
    train(ROOT, settings | {"learner.trajectories_per_step": stored})
    lines = read_json_lines(OUT / "run" / "metrics.jsonl")[1:]
    return statistics.median(line["time/step_s"] for line in lines)


def main() -> None:
    """Train in pairs."""
    options = read_options(__doc__, model="tiny", steps=20, pairs=3)
    make_world()
    settings = settings_of(options.model, options.steps) | NO_EVALUATION
    sides = {"all": partial(step_s, settings, "all"), "none": partial(step_s, settings, 0)}
    found = alternate(sides, options.pairs)
    row = compare("seconds of a step: all stored, and none", found["all"], found["none"])
    write_report("storage", [row], **vars(options))


if __name__ == "__main__":
    main()
