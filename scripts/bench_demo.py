"""Compares the demo with that of another revision: seconds of the whole command, side by side.

    python scripts/bench_demo.py [--base REVISION] [--pairs 3] [--steps N]

Clones the other revision into runs/bench/demo, sets it up there as a user would, and then trains
the demo of both by turns. Worlds are generated before. Writes runs/bench/demo.json. A ratio below 1
means that this revision takes less.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "bench"
CONFIG = Path("examples", "tiny_world", "run.toml")
FIRST_RELEASE = "17aa504"
LOOK_S = 0.05


@dataclass(frozen=True)
class Demo:
    """One run of the demo."""

    wall_s: float
    """Of the whole command, start and end of every service included."""
    first_step_s: float
    """From the command to the end of its first step, the evaluation before it included."""
    cpu_s: float
    """CPU time of all processes."""
    em_after: float


def prepare(base: str) -> Path:
    """Clone a revision and set it up, unless that was done before; return its folder."""
    folder = OUT / "demo" / base
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(folder)], check=True)
        subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", base], check=True)
    subprocess.run(["make", "setup"], cwd=folder, check=True)
    return folder


def run_demo(folder: Path, steps: int | None) -> Demo:
    """Train what a folder's demo trains, to its end."""
    run_dir = OUT / "demo" / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [folder / ".venv/bin/agent-r1", "train", folder / CONFIG, "--run-dir", run_dir]
    command += [] if steps is None else ["--set", f"learner.steps={steps}"]
    metrics = run_dir / "metrics.jsonl"
    started = time.monotonic()
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
    # wait4 below asks for the CPU time, so nothing before it may collect the process.
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while os.waitid(os.P_PID, process.pid, look) is None:
        if metrics.exists() and metrics.stat().st_size:
            break
        time.sleep(LOOK_S)
    first_step_s = time.monotonic() - started
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command[0]} ended with {process.returncode}; see {run_dir / 'logs'}")
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return Demo(wall_s, first_step_s, usage.ru_utime + usage.ru_stime, summary["em_after"])


def main() -> None:
    """Run both by turns and print the ratios."""
    parser = argparse.ArgumentParser(description="Compare the demo with another revision's.")
    parser.add_argument("--base", default=FIRST_RELEASE, help=f"revision (default {FIRST_RELEASE})")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--steps", type=int, help="learner steps (default: the demo's)")
    arguments = parser.parse_args()
    base = prepare(arguments.base)
    for folder in (base, ROOT):
        program = folder / ".venv/bin/python"
        subprocess.run([program, folder / "scripts/demo", "--world-only"], check=True)
    pairs: list[dict[str, Demo]] = []
    for number in range(arguments.pairs):
        sides = [("base", base), ("this", ROOT)]
        pair = {name: run_demo(at, arguments.steps) for name, at in sides[:: 1 - 2 * (number % 2)]}
        pairs.append(pair)
        for name, demo in sorted(pair.items()):
            print(f"pair {number + 1} {name}: {asdict(demo)}", flush=True)
    ratios = {
        key: [getattr(pair["this"], key) / getattr(pair["base"], key) for pair in pairs]
        for key in ("wall_s", "first_step_s", "cpu_s")
    }
    for key, values in ratios.items():
        print(f"{key}: this / base {statistics.median(values):.2f}, of {sorted(values)}")
    record = {
        "base": arguments.base,
        "pairs": [{k: asdict(v) for k, v in p.items()} for p in pairs],
    }
    (OUT / "demo.json").write_text(json.dumps({**record, "ratios": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
