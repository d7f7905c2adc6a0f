"""Processes that a program leaves behind by killing the guest above it (`sandbox = "container"`).

Without a namespace they outlive the guest. This process adopts them instead of process 1, and
`worker.py` ends them with the sandbox.
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

from agent_r1.sandbox.usage import find_children, find_tree

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
_PAUSE_S = 0.001
_PR_SET_CHILD_SUBREAPER = 36
_KILL_USER = (
    "import os, sys; user = int(sys.argv[1]); os.setgroups([]); os.setresgid(user, user, user); "
    "os.setresuid(user, user, user); os.kill(-1, 9)"
)


def adopt_orphans() -> None:
    """Become the parent of what a guest leaves behind.

    Raises:
        ValueError: the kernel refuses it.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
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
