"""The memory of this machine, and what of it this process may still take.

Standard library only, and for Python 3.7: `setup/preflight.py` asks before anything is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
MIB = 2**20
GIB = 2**30


_OOM_COUNTERS = (
    Path("/proc/vmstat"),
    CGROUP / "memory.events",
    CGROUP / "memory" / "memory.oom_control",
)


class _GroupFiles(NamedTuple):
    """Files in which a version of control groups tells what a group may take, below `CGROUP`."""

    limit: str
    used: str
    statistics: str
    unused_cache: str
    """Statistic of cached pages of files, part of `used`, that are given up when needed."""


_VERSIONS = (
    _GroupFiles("memory.max", "memory.current", "memory.stat", "inactive_file"),
    _GroupFiles(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Version 2, then version 1."""


def meminfo_bytes(field: str) -> int | None:
    """Return a field of /proc/meminfo in bytes; None where there is none."""
    kilobytes = _fields(MEMINFO).get(field + ":")
    return None if kilobytes is None else kilobytes * 1024  # it writes kB and means KiB


def free_memory_bytes() -> int | None:
    """Return the memory that this process may still take, in bytes; None when it cannot be known.

    What the machine has available, or less where a container's control group allows less.
    """
    free = meminfo_bytes("MemAvailable")
    if free is None:
        return None
    for files in _VERSIONS:
        limit, used = _number(CGROUP / files.limit), _number(CGROUP / files.used)
        if limit is not None and used is not None:
            cache = _fields(CGROUP / files.statistics).get(files.unused_cache, 0)
            free = min(free, max(0, limit - used + cache))
    return free


def oom_kills() -> int | None:
    """Return how many processes were killed for want of memory; None when it cannot be known.

    Of this machine since it was booted, and of this container's control group.
    """
    counts = [_fields(path).get("oom_kill") for path in _OOM_COUNTERS]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _number(path: Path) -> int | None:
    """Return the number in a file; None where it has none, such as "max"."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _fields(path: Path) -> dict[str, int]:
    """Return the second word of every line by the first."""
    try:
        words = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
