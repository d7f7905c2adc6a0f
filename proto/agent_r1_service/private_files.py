"""Folders and files for their owner alone: run folders, and what holds passwords or leads to them.

A run folder holds prompts, answers, weights and the way to the run's Redis.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

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
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)  # it may have existed
        file.write(text)
