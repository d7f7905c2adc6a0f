"""What a tree of processes uses, read from /proc by the service, out of the programs' reach."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:", "HugetlbPages:")


def find_tree(root: int) -> list[int]:
    """Return a process and all that descend from it, parents first; [] when it is gone."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += find_children(pid)
    return found


def find_children(pid: int) -> list[int]:
    """Return the children of all threads of a process; [] when it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii")
            found += map(int, children.split())
    return found


def measure_memory(pids: list[int]) -> int:
    """Return the memory of these processes that no file backs, in bytes."""
    return sum(_memory_of(pid) for pid in pids)


def _memory_of(pid: int) -> int:
    """Return the memory of one process, as its first thread that lives says.

    The main thread may have ended while others go on with the memory of all.
    """
    with contextlib.suppress(OSError, ValueError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            status = Path(f"/proc/{pid}/task/{thread}/status").read_text("ascii", "replace")
            lines = [line for line in status.splitlines() if line.startswith(_COUNTED)]
            if lines:
                return sum(int(line.split()[1]) << 10 for line in lines)
    return 0


def count_user_tasks(uid: int) -> int:
    """Return how many threads this user has on the machine, or in the container."""
    total = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid:
                    total += len(os.listdir(f"/proc/{entry.name}/task"))
    return total
