"""Say how much of the gain of true labels training on a learned reward has, and draw both rewards.

    python examples/deep_world/unlabelled.py

reads the cells of unlabelled_true.toml and unlabelled_second.toml, and the metrics of the long runs
with both reward models, and writes `unlabelled.json` and `unlabelled.svg` to
docs/results/deep_world.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from agent_r1.evaluation.statistics import bootstrap_mean
from agent_r1.evaluation.table.chart import line_chart

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "deep_world"
RUNS = ROOT / "runs" / "table"
SETS = ("in_domain", "longer", "compositions", "wording")
SEEDS = (0, 1, 2, 3, 4)
BASE = "methods_base_tool_call"
"""The cell of the base model, of table.toml: the questions are the same."""
REWARDS = {"learned reward": "reward/reward_model", "true reward": "reward/exact_match"}
MODELS = ("first", "second")
SMOOTHED_STEPS = 10


def average(cells: Path, name: str) -> float:
    """Return the exact match of a cell, mean over the sets."""
    scores = json.loads((cells / f"{name}.json").read_text(encoding="utf-8"))["scores"]
    return float(np.mean([np.mean(scores[one]) for one in SETS]))


def gain_shares(cells: Path) -> dict[int, float]:
    """Return the gain over the base model by the learned reward, over that by labels, by seed.

    Raises:
        FileNotFoundError: a cell is missing; its table has not been run to its end.
    """
    base = average(cells, BASE)

    def gain(method: str, seed: int) -> float:
        return average(cells, f"{method}_seed{seed}") - base

    return {seed: gain("second_reward", seed) / gain("true_labels", seed) for seed in SEEDS}


def curve(run: Path, key: str) -> list[float]:
    """Return a metric of a run, as the mean of the last ten steps at every step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = [json.loads(line)[key] for line in lines]
    first = [max(0, end - SMOOTHED_STEPS) for end in range(1, len(values) + 1)]
    return [float(np.mean(values[start : step + 1])) for step, start in enumerate(first)]


def long_run(runs: Path, model: str) -> Path:
    """Return the folder of the run of 240 steps with a reward model."""
    return runs / f"unlabelled_{model}" / "runs" / f"{model}_reward_long_seed0"


def main() -> None:
    """Parse the command line, write the files and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to read and to write")
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the tables' runs")
    arguments = parser.parse_args()
    try:
        shares = gain_shares(arguments.results / "cells")
        curves = {
            f"{name}, {model} model": curve(long_run(arguments.runs, model), key)
            for model in MODELS
            for name, key in REWARDS.items()
        }
    except FileNotFoundError as exc:
        parser.error(f"{exc.filename} is missing; run `sh examples/deep_world/unlabelled.sh`")
    found = bootstrap_mean(list(shares.values()))
    report: dict[str, Any] = {
        "share_of_the_gain": {"mean": found.mean, "low": found.low, "high": found.high},
        "by_seed": shares,
        "curves": curves,
    }
    text = json.dumps(report, indent=1) + "\n"
    (arguments.results / "unlabelled.json").write_text(text, encoding="utf-8")
    picture = line_chart(
        curves, title="Learned against true reward", x_label="training step", y_label="mean reward"
    )
    (arguments.results / "unlabelled.svg").write_text(picture, encoding="utf-8")
    print(f"share of the gain of true labels: {found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]")
    for seed, share in shares.items():
        print(f"  seed {seed}: {share:.3f}")


if __name__ == "__main__":
    main()
