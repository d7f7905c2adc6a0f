"""Planted falls: what the console names first for runs whose score was made to fall.

    make bench CASE=falls ARGS="--seeds 0 1 2 3 4 5 6 7 8 9"

Trains --steps steps of 4 groups x 4 samples through every service for each seed and each cause
(planted.py): from step --at on a tool is broken, a component is pleased at the answers' expense,
half of the tasks are hard, or weights are damaged on their way; or nothing is. Beside it comes a
change that does no harm: a slower tool, a new set of equal difficulty, or longer answers. The
report counts how often the page names first what was planted, and how often nothing in runs without
a fall. A run takes half a minute of CPU time; one that has finished is not trained again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from agent_r1.config.live_run import run_config
from agent_r1.console.fall_view import Fall, Numbers, read_fall
from agent_r1.console.series import RunMetrics
from agent_r1.learner.outcome import last_summary
from agent_r1.runtime.files.run_folder import CHECKPOINTS_DIR
from benchmarks.harness import OUT, Row, read_options, write_report
from benchmarks.planted import CAUSES, HARMLESS, PLANTED_AT, STEPS, Plan, run_plan
from benchmarks.processes import redis_server

NAMED = {
    "broken tool": "tool: lookup: result",
    "hacked component": "component: bench_falls:flattery",
    "hard subset": "tasks: set",
    "bad push": "weights: weights",
}
"""What the page has to name first, by cause."""
GOAL = 0.9


def look(folder: Path) -> Fall:
    """Return what the page shows of a run when nothing is chosen."""
    metrics = RunMetrics(folder)
    metrics.update()
    config = run_config(folder)
    fall = read_fall(folder, Numbers.of(metrics, config), config, "", None)
    assert fall is not None
    return fall


def is_right(cause: str, fall: Fall) -> bool:
    """Return whether what was planted is named first; without a fall, whether nothing is."""
    return not fall.fell if cause not in NAMED else fall.named[:1] == [NAMED[cause]]


def train(plan: Plan, place: Path) -> None:
    """Train a run in this process, and keep what the console reads."""
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as (url, _):
        run = asyncio.run(run_plan(plan, place, url))
    for name in (CHECKPOINTS_DIR, "weights"):
        shutil.rmtree(run / name)


def measure(plan: Plan) -> dict[str, Any]:
    """Train a run unless it is there, and look at it."""
    place = OUT / "falls" / f"{plan.cause.replace(' ', '_')}_{plan.seed}"
    if last_summary(place / "run").get("status") != "finished":
        shutil.rmtree(place, ignore_errors=True)
        # A process each, which gives all memory back; forked, because imports take seconds.
        training = get_context("fork").Process(target=train, args=(plan, place))
        training.start()
        training.join()
        if training.exitcode != 0:
            sys.exit(f"falls: the run in {place} ended with status {training.exitcode}")
    started = time.process_time()
    fall = look(place / "run")
    took = time.process_time() - started
    change, why = fall.change, fall.explanation
    return {
        "cause": plan.cause,
        "beside it": plan.harmless,
        "seed": plan.seed,
        "score": change.score,
        "after": change.after,
        "change": [round(value, 3) for value in (change.mean, change.low, change.high)],
        "fell": change.fell,
        "named": fall.named,
        "parts": {} if why is None else {part.name: round(part.mean, 3) for part in why.parts},
        "right": is_right(plan.cause, fall),
        "CPU s": round(took, 2),
    }


def summarise(found: list[dict[str, Any]]) -> list[Row]:
    """Return a row for each cause."""
    rows: list[Row] = []
    for cause in CAUSES:
        runs = [one for one in found if one["cause"] == cause]
        right = sum(one["right"] for one in runs)
        met = "met" if right >= GOAL * len(runs) else "missed"
        what = "planted cause named first" if cause in NAMED else "nothing named"
        row: Row = {"planted": cause, "runs": len(runs), "asked": what, "right": right}
        rows += [row | {"goal": f"≥ {GOAL:.0%}, {met}"}] if runs else []
    return rows


def main() -> None:
    """Train, look, and write the report."""
    options = read_options(
        __doc__, seeds=tuple(range(10)), causes=CAUSES, steps=STEPS, at=PLANTED_AT
    )
    logging.disable(logging.WARNING)  # of failing calls, which are planted
    found: list[dict[str, Any]] = []
    for seed in options.seeds:
        for number, cause in enumerate(options.causes):
            harmless = HARMLESS[(seed + number) % len(HARMLESS)]
            found.append(measure(Plan(cause, harmless, seed, options.steps, options.at)))
            print({k: v for k, v in found[-1].items() if k != "parts"}, flush=True)
    write_report("falls", summarise(found), steps=options.steps, at=options.at, runs=found)


if __name__ == "__main__":
    main()
