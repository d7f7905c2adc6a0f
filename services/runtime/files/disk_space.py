"""Disk space for what a service will write, checked before it begins."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from agent_r1.runtime.memory import MIB

HEADROOM = 1.1
"""Free space asked for, as a multiple of the estimate."""
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 2**29
"""Bytes for the buffers of NCCL and of vLLM's workers: half of the 1 GiB that NVIDIA advises for
containers, so that one with as much is not refused for what else is in it."""


def nearest_existing(path: Path) -> Path:
    """Return `path`, or its nearest parent that exists."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


def free_bytes(path: Path) -> int:
    """Return free bytes on the file system of `path` or its nearest existing parent."""
    return shutil.disk_usage(nearest_existing(path)).free


def out_of_inodes(path: Path) -> bool:
    """Say whether the file system of `path` has no room for one more file, whatever its size."""
    status = os.statvfs(nearest_existing(path))
    return status.f_files > 0 and status.f_favail == 0  # some count none


def free_text(path: Path) -> str:
    """Say how much is free where a disk is full: bytes, or the files that ran out before them."""
    free = f"{free_bytes(path) / MIB:.1f} MiB are free"
    if out_of_inodes(path):
        return f"{free}, but no inodes: it holds as many files as it can (`df -i`), so delete some"
    return free


def readable_size(size_bytes: float) -> str:
    """Return a size for a message: 2.85 MB, 15.20 GB."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.2f} MB"


def require_room(what: str, path: Path, need_bytes: float, remedy: str) -> None:
    """Refuse to begin work whose files will not fit, with a tenth to spare.

    Args:
        what: needs the room, in the plural.
        path: where; it need not exist yet.
        need_bytes: how much, in bytes.
        remedy: what the user can do besides freeing space.

    Raises:
        ValueError: less is free.
    """
    free, need = free_bytes(path.absolute()), need_bytes * HEADROOM
    if free < need:
        raise ValueError(
            f"{path} has {readable_size(free)} free, and {what} need {readable_size(need)}; free "
            f"space there, or {remedy}"
        )
    if out_of_inodes(path.absolute()):
        raise ValueError(f"{path} has no room for {what}: {free_text(path)}, or {remedy}")


def require_shared_memory(what: str) -> None:
    """Refuse to start several processes that exchange data through too little shared memory.

    Containers have 64 MiB of it by default, and what then fails in NCCL does not say why.

    Raises:
        ValueError: less than SHARED_MEMORY_BYTES are free.
    """
    remedy = "set a larger shm_size for the container (docker run --shm-size)"
    require_room(what, SHARED_MEMORY, SHARED_MEMORY_BYTES, remedy)
