"""Folders and files for their owner alone: run folders, and what holds passwords or leads to them.

A run folder holds prompts, answers, weights and the way to the run's Redis.
"""

from __future__ import annotations

import logging
from pathlib import Path

from agent_r1.runtime.files.file_formats import read_text
from agent_r1.runtime.files.writing import write_atomically

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


def read_secret(file: Path, key: str, remedy: str) -> str:
    """Read a file that holds one secret.

    Args:
        file: the file.
        key: what names it, for the message.
        remedy: what to do where it cannot be read, for the message.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return read_text(file).strip()
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or "it is not text"
        raise ValueError(
            f"{key} ({file}) cannot be read: {why}; {remedy}, readable by the services' user alone"
        ) from exc


def write_private(path: Path, text: str) -> None:
    """Write a file that its owner alone may read, from its first byte on."""
    write_atomically(path, text, mode=0o600)
