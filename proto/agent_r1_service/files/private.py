"""Folders and files for their owner alone: run folders, and what holds passwords or leads to them.

A run folder holds prompts, answers, weights and the way to the run's Redis.
"""

from __future__ import annotations

import logging
from pathlib import Path

from agent_r1_service.files.writing import write_atomically

logger = logging.getLogger(__name__)

_OTHERS = 0o077


def private_folder(path: Path) -> None:
    """Create a folder that its owner alone may use, or close one that exists to all others.

    Raises:
        OSError: it cannot be created.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = path.stat().st_mode
    if not mode & _OTHERS:
        return
    try:
        path.chmod(mode & ~_OTHERS)
    except PermissionError:
        logger.warning("folder is open to other users and is not ours to close path=%s", path)


def write_private(path: Path, text: str) -> None:
    """Write a file that its owner alone may read, from its first byte on."""
    write_atomically(path, text, mode=0o600)
