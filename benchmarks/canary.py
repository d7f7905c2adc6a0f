"""Canary readings of pushes that arrived, and of the same pushes had they been missed.

    make bench CASE=canary ARGS="--seeds 0 1 2 --set KEY=VALUE"

Trains tiny_world without evaluation. Right before a version is published, the server is asked for
the log-probabilities that the canary will compare: that is what it would answer if the push were
missed. The report has both distributions of the mean |dlogp|, what share of them the canary judges
rightly, and what share of a step it takes. A missed push counts if its step had a gradient and a
learning rate above a tenth of the largest: others change less than float32 can show.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agent_r1.learner.weights.canary import MEAN_DLOGP
from benchmarks.harness import OUT, Row, read_options, write_report
from benchmarks.plugins.bench_parts import MISSED_PUSHES
from benchmarks.processes import NO_EVALUATION, make_world, read_json_lines, train_command

BOUND = MEAN_DLOGP["float32"]
SETTINGS = {
    **NO_EVALUATION,
    "learner.advantage": "bench_parts:WatchedGrpo",
    "learner.canary_action": "warn",
    "learner.keep_best": 0,
}
TENTH = 0.1


def read_pushes(folder: Path) -> list[dict[str, float]]:
    """Return what a run measured of each push."""
    steps = read_json_lines(folder / "metrics.jsonl")
    largest = max(step["learn/lr"] for step in steps)
    return [
        {
            "step": step["step"],
            "right": step["canary/dlogp_mean"],
            "missed": missed["mean"],
            "counts": step["grad/norm"] > 0 and step["learn/lr"] > TENTH * largest * (1 + 1e-9),
            "cost": step["push/canary_s"] / (step["time/step_s"] - missed["extra_s"]),
        }
        for step, missed in zip(steps, read_json_lines(folder / MISSED_PUSHES), strict=True)
    ]


def distribution(what: str, values: Sequence[float], judged_rightly: Sequence[bool]) -> Row:
    """Return the row of one kind of pushes."""
    at = {"smallest": 0, "1 %": 1, "median": 50, "99 %": 99, "largest": 100}
    quantiles = np.percentile(values, list(at.values()), method="nearest").tolist()
    share = sum(judged_rightly) / len(values)
    return {
        "pushes": what,
        "n": len(values),
        **dict(zip(at, quantiles, strict=True)),
        "seen": share,
    }


def main() -> None:
    """Train every seed and report what the canary saw, and what it would have seen."""
    options = read_options(__doc__, seeds=(0, 1, 2), set=())
    make_world()
    pushes: list[dict[str, float]] = []
    for seed in options.seeds:
        folder = OUT / "canary" / f"seed{seed}"
        command = train_command(folder, {**SETTINGS, "run.seed": seed})
        more = [f"--set={setting}" for setting in options.set]
        subprocess.run([*command, *more], check=True, stdout=subprocess.DEVNULL)
        pushes += read_pushes(folder)
    right = [push["right"] for push in pushes]
    missed = [push["missed"] for push in pushes if push["counts"]]
    rows = [
        distribution("equal weights", right, [value <= BOUND for value in right]),
        distribution("one missed push", missed, [value > BOUND for value in missed]),
    ]
    cost = statistics.median(push["cost"] for push in pushes)
    write_report("canary", rows, bound=BOUND, share_of_a_step=cost, pushes=pushes)
    print(f"with the bound {BOUND:g}; the canary takes {cost:.2%} of a step (median)")


if __name__ == "__main__":
    main()
