"""A temporary folder of one process: it is removed with it, or by the next one if it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from pathlib import Path

_LOCK = "lock"


def remove_left_behind(parent: Path, prefix: str) -> None:
    """Remove the folders of processes that were killed."""
    for other in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), (other / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other, ignore_errors=True)


class OwnFolder:
    """Makes a folder of this process's own, and removes those of processes that were killed.

    Args:
        parent: the folder is made in here; None is the system's folder for temporary files.
        prefix: of its name, and of the names of those to remove.
    """

    def __init__(self, parent: Path | None, prefix: str) -> None:
        parent = parent or Path(tempfile.gettempdir())
        parent.mkdir(parents=True, exist_ok=True)
        remove_left_behind(parent, prefix)
        # Under another name until it is locked: nobody may take it for one that was left behind.
        unlocked = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
        self._lock = (unlocked / _LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = unlocked.rename(parent / unlocked.name.removeprefix("."))

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def keep(self) -> None:
        """Leave the folder to the user: no later process removes it."""
        (self.path / _LOCK).unlink(missing_ok=True)
        self._lock.close()
