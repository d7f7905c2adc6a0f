"""The processes of sandboxes, as the service sees them in /proc: out of the programs' reach.

Says what a tree of processes uses, and ends those that a program leaves behind by killing the guest
above it (`sandbox = "container"`). Without a namespace they outlive the guest. This process adopts
them instead of process 1, and `worker.py` ends them with the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from pathlib import Path

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
_PAUSE_S = 0.001
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:", "HugetlbPages:")
_SHARED = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:", "Private_Hugetlb:")
_KILL_USER = (
    "import os, sys; user = int(sys.argv[1]); os.setgroups([]); os.setresgid(user, user, user); "
    "os.setresuid(user, user, user); os.kill(-1, 9)"
)


def adopt_orphans() -> None:
    """Become the parent of what a guest leaves behind.

    Raises:
        ValueError: the kernel refuses it.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_from_user() -> None:
    """Keep this process's memory and files from programs that have the same user."""
    _prctl(_PR_SET_DUMPABLE, 0)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise ValueError(f"prctl is refused: {os.strerror(ctypes.get_errno())}")


def find_orphans() -> list[int]:
    """Return the children of this process that were started by a program.

    A program runs under one filter more than this process, and in another session than the guests.
    It can change neither.
    """
    return [pid for pid in find_children(os.getpid()) if _is_orphan(pid)]


def _is_orphan(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getsid(pid) != os.getsid(0) and _count_filters(pid) > _count_filters(os.getpid())
    return False


def _count_filters(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition("Seccomp_filters:")[2].split()[0])


async def end_orphans(uid: int | None) -> None:
    """Kill what the guests that have ended left behind, and all that it started.

    Args:
        uid: the user that only the ended sandbox has; None where it has none.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    while orphans := find_orphans():
        if uid is not None:
            await _kill_user(uid)
        for orphan in orphans:
            _kill_tree(orphan)
        if time.monotonic() > deadline:
            logger.error("processes of a program do not end pids=%s", orphans)
            return
        await asyncio.sleep(_PAUSE_S)  # a killed process is gone only once the kernel has run it


async def _kill_user(uid: int) -> None:
    """Kill all processes of a user at once, also those that fork and end faster than we look."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _KILL_USER, str(uid)),
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    await process.wait()


def _kill_tree(orphan: int) -> None:
    for pid in find_tree(orphan):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(orphan, os.WNOHANG)


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


def measure_shares(pids: list[int]) -> int:
    """Return the same where pages that processes share count once, in bytes; takes far longer."""
    return sum(_share_of(pid) for pid in pids)


def _share_of(pid: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii", "replace")
        except PermissionError:
            return _memory_of(pid)
        lines = [line for line in rollup.splitlines() if line.startswith(_SHARED)]
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
