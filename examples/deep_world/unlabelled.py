"""Say how much of the gain of true labels training on a learned reward has, and draw both rewards.

    python examples/deep_world/unlabelled.py

reads the cells of unlabelled_true.toml and unlabelled_learned.toml; writes `unlabelled.json` and
`unlabelled.svg` to docs/results/deep_world.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agent_r1.evaluation.experiments.drawing import curves, draw
from agent_r1.evaluation.experiments.estimates import Means, resampled_means, score_array
from agent_r1.evaluation.statistics import LEVEL, SEED, Estimate, percentile_interval

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "deep_world"
SETS = ("in_domain", "longer", "compositions", "wording")
SEEDS = (0, 1, 2, 3, 4)
BASE = "methods_base_tool_call"
"""The cell of the base model, of table.toml: the questions are the same."""
LONG_RUNS = {"free": "learned_reward_long", "held near the base model": "learned_reward_kl_long"}
"""The methods of 160 steps, by what the picture calls them."""
SMOOTHED_STEPS = 10


def read_cell(cells: Path, name: str) -> dict[str, Any]:
    """Return a cell.

    Raises:
        FileNotFoundError: it is missing; its table has not been run to its end.
    """
    return json.loads((cells / f"{name}.json").read_text(encoding="utf-8"))


def average(cells: Path, name: str) -> float:
    """Return the exact match of a cell, mean over the sets."""
    scores = read_cell(cells, name)["scores"]
    return float(np.mean([np.nanmean(score_array([scores[one]])) for one in SETS]))


def gain_shares(cells: Path) -> dict[int, float]:
    """Return the gain over the base model by the learned reward, over that by labels, by seed."""
    base = average(cells, BASE)

    def gain(method: str, seed: int) -> float:
        return average(cells, f"{method}_seed{seed}") - base

    return {seed: gain("learned_reward_kl", seed) / gain("true_labels", seed) for seed in SEEDS}


def share_of_the_gain(cells: Path) -> Estimate:
    """Estimate the mean share, with an interval over other seeds and other questions.

    All runs answer the same questions, so each resample draws them once for all runs.
    """
    base_R = resampled_averages(cells, BASE)

    def gain(method: str, seed: int) -> Means:
        return resampled_averages(cells, f"{method}_seed{seed}") - base_R

    shares_RS = np.stack(
        [gain("learned_reward_kl", seed) / gain("true_labels", seed) for seed in SEEDS], axis=1
    )
    drawn_RS = np.random.default_rng(SEED).integers(0, len(SEEDS), size=shares_RS.shape)
    means_R = np.take_along_axis(shares_RS, drawn_RS, axis=1).mean(axis=1)
    return percentile_interval(float(np.mean([*gain_shares(cells).values()])), means_R, LEVEL)


def resampled_averages(cells: Path, name: str) -> Means:
    """Return the average of a cell in each resample; the questions are the same for every cell."""
    scores = read_cell(cells, name)["scores"]
    return np.mean(resampled_means([score_array([scores[one]]) for one in SETS], [None]), axis=0)


def curves_of_long_run(cells: Path, policy: str) -> dict[str, list[float]]:
    """Return learned and true reward of the 160 steps of a policy, smoothed."""
    cell = read_cell(cells, f"{LONG_RUNS[policy]}_seed0")
    return {
        f"learned reward, {policy}": smoothed(cell["components"]["reward_model"]),
        f"true reward, {policy}": smoothed(cell["curve"]),
    }


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of the last ten values at every value."""
    first = [max(0, end - SMOOTHED_STEPS) for end in range(1, len(values) + 1)]
    return [float(np.mean(values[start : step + 1])) for step, start in enumerate(first)]


def main() -> None:
    """Parse the command line, write the files and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to read and to write")
    arguments = parser.parse_args()
    try:
        cells = arguments.results / "cells"
        shares, found = gain_shares(cells), share_of_the_gain(cells)
        lines: dict[str, list[float]] = {}
        for policy in LONG_RUNS:
            lines |= curves_of_long_run(cells, policy)
    except FileNotFoundError as exc:
        parser.error(f"{exc.filename} is missing; run `sh examples/deep_world/unlabelled.sh`")
    report: dict[str, Any] = {
        "share_of_the_gain": {"mean": found.mean, "low": found.low, "high": found.high},
        "by_seed": shares,
        "curves": lines,
    }
    text = json.dumps(report, indent=1) + "\n"
    (arguments.results / "unlabelled.json").write_text(text, encoding="utf-8")
    panel = curves(lines, "training step", "mean reward")
    picture = "Learned against true reward", [[panel]]
    draw(arguments.results / "unlabelled.svg", picture)
    print(f"share of the gain of true labels: {found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]")
    for seed, share in shares.items():
        print(f"  seed {seed}: {share:.3f}")


if __name__ == "__main__":
    main()
