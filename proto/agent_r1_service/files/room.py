"""Whether there is room for what a service will write, asked before it begins."""

from __future__ import annotations

import shutil
from pathlib import Path

HEADROOM = 1.1
"""Free space asked for, as a multiple of the estimate."""
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 2**29
"""For the buffers of NCCL and of vLLM's workers: half of the 1 GiB that NVIDIA advises for
containers, so that one with as much is not refused for what else is in it."""


def nearest_existing(path: Path) -> Path:
    """Return `path`, or its nearest parent that exists."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


def free_bytes(path: Path) -> int:
    """Return free bytes on the file system of `path` or its nearest existing parent."""
    return shutil.disk_usage(nearest_existing(path)).free


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


def require_shared_memory(what: str) -> None:
    """Refuse to start several processes that exchange data through too little shared memory.

    Containers have 64 MiB of it by default, and what then fails in NCCL does not say why.

    Raises:
        ValueError: less than SHARED_MEMORY_BYTES are free.
    """
    remedy = "set a larger shm_size for the container (docker run --shm-size)"
    require_room(what, SHARED_MEMORY, SHARED_MEMORY_BYTES, remedy)
