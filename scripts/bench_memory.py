"""Memory of a run with all services, by process.

    python scripts/bench_memory.py [--steps 6] [--set KEY=VALUE ...]

Runs some steps of tiny_world with its evaluations, and twice a second adds up the proportional set
size (PSS: pages that processes share are divided among them) of every process of the run. Writes
the largest sum, and what each process had then, to runs/bench/memory.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
from bench_tools import entry, print_entries
from process_memory import memory_of

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "bench"
GOAL_GB = 2.5
BEFORE_GB = 3.5
POLL_S = 0.5


def train(steps: int, settings: list[str]) -> dict[str, float]:
    """Run the steps and return the memory of the moment at which its sum was largest."""
    folder = OUT / "memory"
    subprocess.run([sys.executable, str(ROOT / "scripts" / "demo"), "--world-only"], check=True)
    shutil.rmtree(folder, ignore_errors=True)
    config = ROOT / "examples" / "tiny_world" / "run.toml"
    command = [str(Path(sys.executable).with_name("agent-r1")), "train", str(config)]
    command += ["--run-dir", str(folder)]
    for text in [f"learner.steps={steps}", *settings]:
        command += ["--set", text]
    running = subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.DEVNULL)
    largest: dict[str, float] = {}
    try:
        root = psutil.Process(running.pid)
        while running.poll() is None:
            now = memory_of(root)
            if sum(now.values()) > sum(largest.values()):
                largest = now
            time.sleep(POLL_S)
    finally:
        running.terminate()
        running.wait(60)
    if running.returncode != 0:
        raise SystemExit(f"the run ended with status {running.returncode}; see {folder}")
    return largest


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description="Measure the memory of a run.")
    parser.add_argument("--steps", type=int, default=6, help="steps of the run")
    parser.add_argument(
        "--set", action="append", default=[], help="KEY=VALUE, as in agent-r1 train"
    )
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    largest = train(arguments.steps, arguments.set)
    total = sum(largest.values())
    for name, size in sorted(largest.items(), key=lambda item: -item[1]):
        print(f"{name:24} {size:6.3f} GB")
    report = [entry("memory/GB at its peak", total, BEFORE_GB, GOAL_GB, "lower", ratio=total)]
    by_process = {name: round(size, 3) for name, size in largest.items()}
    text = json.dumps({"entries": report, "by_process": by_process}, indent=1)
    (OUT / "memory.json").write_text(text + "\n", encoding="utf-8")
    print_entries(report)


if __name__ == "__main__":
    main()
