"""Writes where the time of a training step goes, in every process, beside what the machine can do.

    python scripts/profile_run.py [--model tiny|90m] [--steps N]

Runs `agent-r1 train`: some steps of examples/tiny_world, or of the random model of 90 million
parameters of bench_step.py. After the first steps, a py-spy for each process samples its stacks to
runs/profile/MODEL_PROCESS.folded (speedscope.app and flamegraph.pl read them). The table tells
the CPU time of each process, divided among its parts as the samples are; it goes to
runs/profile/MODEL.json. py-spy slows the run, so the phases come from a second run without it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from bench_step import prepare_model, train_command
from machine_limits import FLOAT_BYTES, Limits, Weights, count_weights, measure_limits
from profile_parts import RULES, count_parts

from agent_r1.runtime.files.json_lines import split_lines

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "profile"
TINY = ROOT / "examples" / "tiny_world" / "base"
RATE_HZ = 100
WARM_STEPS = 2
POLL_S = 0.05
SMALLEST_MS = 0.5
PHASES = ("step_s", "rollout_s", "reward_s", "learn_s", "push_s")


def tiny_command(run_dir: Path, steps: int) -> list[str]:
    """Return the command that runs the first steps of tiny_world."""
    subprocess.run([sys.executable, str(ROOT / "scripts/demo"), "--world-only"], check=True)
    command: list[str | Path] = [Path(sys.executable).with_name("agent-r1"), "train"]
    command += [ROOT / "examples/tiny_world/run.toml", "--run-dir", run_dir]
    for setting in (f"learner.steps={steps}", "evaluation.every=0", "evaluation.sets={}"):
        command += ["--set", setting]
    return [str(part) for part in command]


def find_processes(run: psutil.Process) -> dict[str, psutil.Process]:
    """Return the processes of a run by name: its services, the engine, and Redis."""
    found: dict[str, psutil.Process] = {"launcher": run}
    for process in run.children(recursive=True):
        command = " ".join(process.cmdline())
        if "subreaper" in command:
            continue
        if service := re.search(r"serve (rollout|learner|reward|tool) ", command):
            found[service.group(1)] = process
        elif "EngineCore" in command:  # as vLLM calls it
            found["engine"] = process
        elif "redis-server" in command:
            found["redis"] = process
    return found


def cpu_s(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """Return the CPU seconds of each process so far."""
    times = {name: process.cpu_times() for name, process in processes.items()}
    return {name: time.user + time.system for name, time in times.items()}


def steps_done(run_dir: Path) -> int:
    """Return the number of steps that a run has written down."""
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_for_steps(run: psutil.Popen, run_dir: Path, steps: int) -> int:
    """Wait until a run has taken so many steps; return how many it has taken.

    Raises:
        SystemExit: the run ended before.
    """
    while (done := steps_done(run_dir)) < steps:
        if run.poll() is not None:
            sys.exit(f"the run ended after {done} of {steps} steps; see {run_dir / 'logs'}")
        time.sleep(POLL_S)
    return done


@dataclass(frozen=True)
class Recording:
    """What a run did while it was sampled."""

    steps: int
    cpu_s: dict[str, float]
    """By process."""
    stacks: dict[str, Path]
    """By process, in py-spy's raw format."""


def record(command: list[str], run_dir: Path, name: str, steps: int) -> Recording:
    """Start a run, sample its processes for some steps after the first, and let it end.

    Raises:
        SystemExit: py-spy is missing or may not look into other processes, or the run failed.
    """
    program = shutil.which("py-spy", path=Path(sys.executable).parent)
    if program is None:
        sys.exit("py-spy is missing from this environment; run `make setup`")
    shutil.rmtree(run_dir, ignore_errors=True)
    run = psutil.Popen(command)
    first = wait_for_steps(run, run_dir, WARM_STEPS)
    processes = find_processes(run)
    stacks = {p: OUT / f"{name}_{p}.folded" for p in processes if p in RULES}
    options = ["--format", "raw", "--rate", str(RATE_HZ), "--nonblocking"]
    spies = [
        subprocess.Popen(
            [program, "record", *options, "--output", file, "--pid", str(processes[process].pid)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for process, file in stacks.items()
    ]
    before = cpu_s(processes)
    last = wait_for_steps(run, run_dir, first + steps)
    after = cpu_s(processes)
    for spy in spies:
        spy.send_signal(signal.SIGINT)
    if any(spy.wait() for spy in spies):
        sys.exit(
            "py-spy may not look into other processes; run this as root, or set the kernel's "
            "kernel.yama.ptrace_scope to 0"
        )
    run.wait()
    taken = {process: after[process] - before[process] for process in processes}
    return Recording(last - first, taken, stacks)


def least_ms(steps: list[dict[str, Any]], weights: Weights, limits: Limits) -> dict[str, float]:
    """Return the least milliseconds that parts of a step could take on this machine.

    Counted are products with the weights alone: 2 operations for each weight and token forward,
    4 backward. An engine step reads all weights at least once, and the longest answer takes as
    many engine steps as it has tokens. A push copies the weights twice.
    """

    def middle(name: str) -> float:
        return statistics.median(step[name] for step in steps)

    sampled = middle("batch/trained_tokens") * weights.head

    def product_ms(tokens: float) -> float:
        return 2000 * (tokens * weights.layers + sampled) / limits.flops_per_s

    read_s = FLOAT_BYTES * weights.all / limits.bytes_per_s
    forward_ms = product_ms(middle("batch/computed_tokens"))
    return {
        "engine, all tokens once": product_ms(middle("batch/tokens")),
        "engine, weights read in each step": 1000 * read_s * middle("response/length_max"),
        "learner, forward": forward_ms,
        "learner, backward": 2 * forward_ms,
        "push, weights copied twice": 1000 * 4 * read_s,
    }


def part_times(recording: Recording) -> dict[str, dict[str, float]]:
    """Return the CPU milliseconds a step of each part of each process."""
    found: dict[str, dict[str, float]] = {}
    for process, seconds in recording.cpu_s.items():
        ms = 1000 * seconds / recording.steps
        parts = {"all of it": ms}
        if file := recording.stacks.get(process):
            counts = count_parts(process, file.read_text(encoding="utf-8", errors="replace"))
            total = counts.total() or 1
            parts = {part: ms * seen / total for part, seen in counts.most_common()}
        found[process] = parts
    return found


def read_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's steps after its first."""
    lines = split_lines((run_dir / "metrics.jsonl").read_text(encoding="utf-8"))
    return [json.loads(line) for line in lines[WARM_STEPS:]]


def summarize(name: str, recording: Recording, run_dir: Path, weights: Weights) -> dict[str, Any]:
    """Return the table: a recording, and the steps of a run that nothing slowed."""
    steps = read_steps(run_dir)
    limits = measure_limits()
    return {
        "model": name,
        "steps": recording.steps,
        "weights": asdict(weights),
        "phases_ms": {
            phase: 1000 * statistics.median(step[f"time/{phase}"] for step in steps)
            for phase in PHASES
        },
        "cpu_ms": part_times(recording),
        "limits": asdict(limits),
        "least_ms": least_ms(steps, weights, limits),
    }


def print_table(found: dict[str, Any]) -> None:
    """Print the table as Markdown."""
    phases = ", ".join(f"{name} {value:.0f}" for name, value in found["phases_ms"].items())
    print(f"\n{found['model']}, medians in ms: {phases}\n")
    print("| process | part | CPU ms a step |\n|---|---|---|")
    for process, parts in found["cpu_ms"].items():
        print(f"| **{process}** | | **{sum(parts.values()):.0f}** |")
        for part, value in parts.items():
            if value >= SMALLEST_MS:
                print(f"| | {part} | {value:.0f} |")
    limits = found["limits"]
    print(
        f"\n1 thread of this machine copies {limits['bytes_per_s'] / 1e9:.1f} GB/s and multiplies "
        f"matrices with {limits['flops_per_s'] / 1e9:.0f} GFLOP/s. At these speeds:\n"
    )
    for part, value in found["least_ms"].items():
        print(f"- {part}: {value:.1f} ms a step at least")


def main() -> None:
    """Profile a run and write the table."""
    parser = argparse.ArgumentParser(description="Write where the time of a training step goes.")
    parser.add_argument("--model", choices=["tiny", "90m"], default="tiny", help="which run")
    parser.add_argument("--steps", type=int, help="steps that are sampled (tiny: 20, 90m: 4)")
    arguments = parser.parse_args()
    name: str = arguments.model
    OUT.mkdir(parents=True, exist_ok=True)
    make = tiny_command if name == "tiny" else partial(train_command, prepare_model())
    model = TINY if name == "tiny" else prepare_model()
    steps: int = arguments.steps or (20 if name == "tiny" else 4)
    run_dir = OUT / f"run_{name}"
    # The steps that pass while py-spy starts and stops.
    recording = record(make(run_dir, steps + WARM_STEPS + 2), run_dir, name, steps)
    shutil.rmtree(run_dir)
    subprocess.run(make(run_dir, steps + WARM_STEPS), check=True)
    found = summarize(name, recording, run_dir, count_weights(model))
    (OUT / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print_table(found)


if __name__ == "__main__":
    main()
