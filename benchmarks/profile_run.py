"""Time of a training step by process and part, beside what the machine can do.

    python -m benchmarks.profile_run --model tiny --steps 20      (or 90m)

Runs `agent-r1 train`: some steps of tiny_world, or of the random model of 90 million parameters.
After the first steps, a py-spy for each process samples its stacks to
runs/bench/profile/MODEL_PROCESS.folded (speedscope.app and flamegraph.pl read them). The table has
the CPU time of each process, divided among its parts as the samples are. py-spy slows the run, so
the phases come from a second run without it.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import OUT, Row, read_options, write_report
from benchmarks.models import BASE, FLOAT_BYTES, count_weights, measure_limits, random_model
from benchmarks.processes import (
    NO_EVALUATION,
    POLL_S,
    cpu_s,
    make_world,
    process,
    read_json_lines,
    service_of,
    train_command,
)
from benchmarks.profile_parts import RULES, count_parts
from benchmarks.run import settings_of

FOLDER = OUT / "profile"
RUN_DIR = FOLDER / "run"
RATE_HZ = 100
WARM_STEPS = 2
SPY_STEPS = 2
"""Steps that pass while py-spy starts and stops."""
PHASES = ("step_s", "rollout_s", "reward_s", "learn_s", "push_s")


def read_steps() -> list[dict[str, Any]]:
    """Return the metrics of the run's steps so far."""
    return read_json_lines(RUN_DIR / "metrics.jsonl")


def wait_for_steps(run: psutil.Popen, steps: int) -> int:
    """Wait until a run has taken so many steps; return how many it has taken.

    Raises:
        SystemExit: the run ended before.
    """
    while (done := len(read_steps())) < steps:
        if run.poll() is not None:
            sys.exit(f"the run ended after {done} of {steps} steps; see {RUN_DIR / 'logs'}")
        time.sleep(POLL_S)
    return done


def processes_of(run: psutil.Process) -> dict[str, psutil.Process]:
    """Return the processes of a run by name: its services, the engine, and Redis."""
    named = {service_of(one): one for one in run.children(recursive=True)}
    return {name: one for name, one in named.items() if name in (*RULES, "redis")} | {
        "launcher": run
    }


@dataclass(frozen=True)
class Recording:
    """What the processes of a run did while they were sampled."""

    cpu_ms: dict[str, float]
    """CPU milliseconds a step, by process."""
    stacks: dict[str, Path]
    """By process, in py-spy's raw format."""


def record(command: Sequence[str], name: str, steps: int) -> Recording:
    """Start a run, sample its processes for some steps after the first, and let it end.

    Raises:
        SystemExit: py-spy may not look into other processes, or the run failed.
    """
    py_spy = [Path(sys.executable).with_name("py-spy"), "record", "--nonblocking"]
    options = [*py_spy, "--format", "raw", "--rate", str(RATE_HZ)]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with process(*command) as run:
        first = wait_for_steps(run, WARM_STEPS)
        found = processes_of(run)
        stacks = {one: FOLDER / f"{name}_{one}.folded" for one in found if one in RULES}
        spies = [
            subprocess.Popen([*options, "--output", file, "--pid", str(found[one].pid)], **quiet)
            for one, file in stacks.items()
        ]
        before = {one: cpu_s(running) for one, running in found.items()}
        taken = wait_for_steps(run, first + steps) - first
        spent = {one: cpu_s(running) - before[one] for one, running in found.items()}
        for spy in spies:
            spy.send_signal(signal.SIGINT)
        if any(spy.wait() for spy in spies):
            sys.exit(
                "py-spy may not look into other processes; run this as root, or set the kernel's "
                "kernel.yama.ptrace_scope to 0"
            )
        run.wait()
    return Recording({one: 1000 * seconds / taken for one, seconds in spent.items()}, stacks)


def part_rows(recording: Recording) -> list[Row]:
    """Return the CPU milliseconds a step of each process and of its parts."""
    rows: list[Row] = []
    for name, ms in recording.cpu_ms.items():
        rows.append({"process": name, "part": "all of it", "CPU ms a step": ms})
        if file := recording.stacks.get(name):
            counts = count_parts(name, file.read_text(encoding="utf-8", errors="replace"))
            rows += [
                {"process": "", "part": part, "CPU ms a step": ms * seen / counts.total()}
                for part, seen in counts.most_common()
            ]
    return rows


def least_ms(model: Path, medians: Mapping[str, float]) -> dict[str, float]:
    """Return the least milliseconds that parts of a step could take on this machine.

    Counted are products with the weights alone: 2 operations for each weight and token forward,
    4 backward. An engine step reads all weights at least once, and the longest answer takes as
    many engine steps as it has tokens. A push copies the weights twice.
    """
    weights, limits = count_weights(model), measure_limits()
    sampled = medians["batch/trained_tokens"] * weights.head

    def product_ms(tokens: float) -> float:
        return 2000 * (tokens * weights.layers + sampled) / limits.flops_per_s

    read_ms = 1000 * FLOAT_BYTES * weights.all / limits.bytes_per_s
    forward_ms = product_ms(medians["batch/computed_tokens"])
    return {
        "GB/s that one thread copies": limits.bytes_per_s / 1e9,
        "GFLOP/s that it multiplies with": limits.flops_per_s / 1e9,
        "engine, all tokens once: ms a step": product_ms(medians["batch/tokens"]),
        "engine, weights read in each step: ms": read_ms * medians["response/length_max"],
        "learner, forward: ms a step": forward_ms,
        "learner, backward: ms a step": 2 * forward_ms,
        "push, weights copied twice: ms": 4 * read_ms,
    }


def main() -> None:
    """Profile a run and write the table."""
    options = read_options(__doc__, model="tiny", steps=0)
    name, steps = options.model, options.steps or (20 if options.model == "tiny" else 4)
    make_world()
    FOLDER.mkdir(parents=True, exist_ok=True)
    settings = {**NO_EVALUATION, **settings_of(name, steps + WARM_STEPS + SPY_STEPS)}
    recording = record(train_command(RUN_DIR, settings), name, steps)
    subprocess.run(train_command(RUN_DIR, settings), check=True)
    after = read_steps()[WARM_STEPS:]
    medians = {
        key: statistics.median(step[key] for step in after if key in step) for key in after[0]
    }
    phases = {phase: 1000 * medians[f"time/{phase}"] for phase in PHASES}
    least = least_ms(BASE if name == "tiny" else random_model("90m"), medians)
    write_report(f"profile/{name}", part_rows(recording), phases_ms=phases, least=least)
    for what, value in {**phases, **least}.items():
        print(f"{what}: {value:.1f}")


if __name__ == "__main__":
    main()
