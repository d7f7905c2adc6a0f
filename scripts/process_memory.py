"""Memory of a run's processes by name, for bench_memory.py, bench_scale.py and gpu_test."""

from __future__ import annotations

from pathlib import Path

import psutil


def pss_gb(pid: int) -> float:
    """Return the proportional set size of a process, in GB; 0 when it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0.0
    fields = (line.split() for line in text.splitlines() if line.startswith("Pss:"))
    return sum(int(field[1]) for field in fields) * 1024 / 1e9


def name_of(process: psutil.Process) -> str:
    """Return what a process of a run is called in the report."""
    words = process.cmdline()
    if not words:
        return process.name()
    if "serve" in words[:-1]:
        place = words.index("serve") + 1
        return "search" if words[place] == "tool" else words[place]
    if any("EngineCore" in word for word in words):
        return "engine"
    if "redis" in words[0] or words[-1].endswith("redis.conf"):  # its parent names it so
        return "redis"
    return Path(words[-1]).name[:24] or process.name()


def memory_of(root: psutil.Process) -> dict[str, float]:
    """Return the PSS of a process and of those below it, in GB by name."""
    found: dict[str, float] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            name = "launcher" if process == root else name_of(process)
        except psutil.Error:
            continue
        found[name] = found.get(name, 0.0) + pss_gb(process.pid)
    return found
