"""A whole run with every service: seconds, CPU time, parts of a step, memory of each process.

    make bench CASE=run ARGS="--model tiny --steps 50 --pairs 1 --against CHECKOUT --set KEY=VALUE"

Trains tiny_world (`--model 90m`: the random model of 90 million parameters, with a reward by
chance and without evaluation). Memory is the largest sum of the proportional set sizes of all
processes (PSS: pages that they share are divided among them), looked at twice a second. CHECKOUT
is another clone with its `.venv`; both then train by turns, each its own tiny_world. Pushes are
medians over the steps of a run but the first.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import OUT, ROOT, Row, alternate, compare, read_options, write_report
from benchmarks.models import random_model
from benchmarks.processes import NO_EVALUATION, memory_of, process, read_json_lines, train_command

LOOK_S = 0.5
PARTS = ("step_s", "rollout_s", "reward_s", "learn_s", "push_s", "em_after", "canary_max_dlogp")
"""Of summary.json."""
WHOLE = ("wall s", "first step s", "CPU s", "memory GB")
PUSH = {"push s": "time/push_s", "pause s": "push/pause_s"}
"""Of metrics.jsonl, as earlier checkouts have them too."""
PUSH_PARTS = {"wait s": "push/wait_s", "gather s": "push/gather_s", "write s": "push/write_s"}
"""The same of the present."""
GOALS = {"push s": "≤ 0.5", "pause s": "≤ 0.5"}
"""Of the ratios to commit 9174d39."""
RANDOM_90M = {
    **NO_EVALUATION,
    "env.max_tokens_per_turn": 64,
    "reward.components": '{"bench_parts:chance" = 1.0}',
    "learner.groups_per_batch": 4,
}


def settings_of(model: str, steps: int, given: Sequence[str] = ()) -> dict[str, object]:
    """Return what a run of a model sets."""
    more = {"model.path": random_model("90m"), **RANDOM_90M} if model == "90m" else {}
    return {"learner.steps": steps, **more, **dict(one.split("=", 1) for one in given)}


def pushes_of(run_dir: Path) -> dict[str, float]:
    """Return the medians of a run's pushes; the first one is slower."""
    lines = read_json_lines(run_dir / "metrics.jsonl")[1:]
    known = {name: key for name, key in (PUSH | PUSH_PARTS).items() if lines and key in lines[0]}
    return {name: statistics.median(line[key] for line in lines) for name, key in known.items()}


def train(checkout: Path, settings: dict[str, object]) -> dict[str, Any]:
    """Train in a checkout, to the end; return the figures of the run.

    Raises:
        SystemExit: the run failed.
    """
    run_dir, used = OUT / "run", resource.getrusage(resource.RUSAGE_CHILDREN)
    command = train_command(run_dir, settings, checkout)
    largest: dict[str, float] = {}
    started, first_step_s = time.monotonic(), 0.0
    with process(*command, stdout=subprocess.DEVNULL) as running:
        while running.poll() is None:
            now = memory_of(running)
            largest = max(largest, now, key=lambda memory: sum(memory.values()))
            if not first_step_s and read_json_lines(run_dir / "metrics.jsonl"):
                first_step_s = time.monotonic() - started
            time.sleep(LOOK_S)
    wall_s = time.monotonic() - started
    if running.returncode != 0:
        sys.exit(f"the run ended with {running.returncode}; see {run_dir / 'logs'}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    whole = dict(zip(WHOLE, (wall_s, first_step_s, cpu, sum(largest.values())), strict=True))
    parts = {name: summary.get(name) for name in PARTS} | pushes_of(run_dir)
    return {**whole, **parts, "memory": largest}


def main() -> None:
    """Train here, and in the other checkout."""
    options = read_options(__doc__, model="tiny", steps=50, pairs=1, against="", set=())
    settings = settings_of(options.model, options.steps, options.set)
    checkouts = {"ours": ROOT}
    if options.against:
        checkouts["other"] = Path(options.against).resolve()
    for checkout in checkouts.values():
        demo = [checkout / ".venv/bin/python", checkout / "scripts/demo", "--world-only"]
        subprocess.run(demo, check=True)
    sides = {name: partial(train, checkout, settings) for name, checkout in checkouts.items()}
    found = alternate(sides, options.pairs)
    rows: list[Row] = [
        {"run": side, **{name: value for name, value in one.items() if name != "memory"}}
        for side, runs in found.items()
        for one in runs
    ]
    ratios: list[Row] = []
    for what in (*WHOLE, *(PUSH if options.steps > 1 else ())) if options.against else ():
        ours, other = ([one[what] for one in runs] for runs in found.values())
        ratios.append(compare(what, ours, other, GOALS.get(what)))
    write_report("run", rows, memory=found["ours"][-1]["memory"], ratios=ratios)


if __name__ == "__main__":
    main()
