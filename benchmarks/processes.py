"""Processes that benchmarks start and watch: services, Redis, whole runs; their CPU and memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from agent_r1.config.redis_server import find_redis_server
from agent_r1.launch.local_redis import free_port
from agent_r1.runtime.files.state import split_lines
from benchmarks.harness import ROOT

TINY_WORLD = "examples/tiny_world/run.toml"
WORLD = ROOT / "examples" / "tiny_world" / "data"
PLUGINS = Path(__file__).with_name("plugins")
POLL_S = 0.05
START_TIMEOUT_S = 300.0
NO_EVALUATION = {
    "evaluation.every": 0,
    "evaluation.sets": "{}",
    "learner.checkpoint_every": 0,
    "run.plugins": json.dumps([str(PLUGINS)]),
}
"""Settings of a run whose steps alone are measured."""


@contextmanager
def process(*command: str | Path, **options: Any) -> Iterator[psutil.Popen]:
    """Run a program while the context lasts."""
    running = psutil.Popen([str(part) for part in command], **options)
    try:
        yield running
    finally:
        if running.poll() is None:
            running.terminate()
        try:
            running.wait(60)
        except psutil.TimeoutExpired:
            running.kill()
            running.wait()


@contextmanager
def redis_server(folder: Path) -> Iterator[tuple[str, psutil.Popen]]:
    """Run a Redis that keeps nothing while the context lasts; yield its URL and its process."""
    port = free_port()
    words = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--logfile", "redis.log"]
    quiet = ["--save", "", "--appendonly", "no"]
    with process(find_redis_server(), *words, *quiet) as running:
        yield f"redis://127.0.0.1:{port}/0", running


def announced_url(folder: Path, name: str, running: psutil.Popen) -> str:
    """Wait for a service's announcement and return its URL.

    Raises:
        SystemExit: it ended before, or was not up in time.
    """
    file, deadline = folder / f"{name}.json", time.monotonic() + START_TIMEOUT_S
    while not file.exists():
        if running.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{name} did not come up (status {running.returncode}); see above or its log")
        time.sleep(POLL_S)
    return json.loads(file.read_text(encoding="utf-8"))["url"]


def make_world() -> Path:
    """Return the folder of tiny_world's questions and corpus, which are generated once."""
    subprocess.run([sys.executable, ROOT / "scripts" / "demo", "--world-only"], check=True)
    return WORLD


def train_command(
    run_dir: Path, settings: Mapping[str, object], checkout: Path = ROOT, config: str = TINY_WORLD
) -> list[str]:
    """Return the command that trains in a run folder, which is emptied.

    Args:
        run_dir: Of the run.
        settings: Override those of the configuration.
        checkout: Whose environment and files the run has.
        config: Of the run, in the checkout.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    words = [checkout / ".venv/bin/agent-r1", "train", checkout / config, "--run-dir", run_dir]
    return [*map(str, words), *(f"--set={key}={value}" for key, value in settings.items())]


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of the complete lines of a file; [] where there is none."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    return [json.loads(line) for line in split_lines(text[: text.rfind("\n") + 1])]


def cpu_s(*running: psutil.Process) -> float:
    """Return the CPU seconds that processes have used so far."""
    times = [one.cpu_times() for one in running]
    return sum(one.user + one.system for one in times)


def tree(root: psutil.Process) -> list[psutil.Process]:
    """Return a process and all below it."""
    return [root, *root.children(recursive=True)]


def pss_gb(pid: int) -> float:
    """Return the proportional set size of a process, in GB; 0 when it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0.0
    fields = (line.split() for line in text.splitlines() if line.startswith("Pss:"))
    return sum(int(field[1]) for field in fields) * 1024 / 1e9


def service_of(running: psutil.Process) -> str:
    """Return what a process of a run is called in a report."""
    words = running.cmdline()
    if "serve" in words[:-1]:
        name = words[words.index("serve") + 1]
        return "search" if name == "tool" else name
    if any("EngineCore" in word for word in words):  # as vLLM calls it
        return "engine"
    if any("redis" in word for word in words):
        return "redis"
    return Path(words[-1]).name[:24] if words else running.name()


def memory_of(root: psutil.Process) -> dict[str, float]:
    """Return the PSS of a process and of those below it, in GB by name."""
    found: dict[str, float] = {}
    for running in tree(root):
        try:
            name = "launcher" if running == root else service_of(running)
        except psutil.Error:
            continue
        found[name] = found.get(name, 0.0) + pss_gb(running.pid)
    return found
