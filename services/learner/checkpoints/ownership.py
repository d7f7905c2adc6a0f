"""One learner writes into a run folder at a time: a lock while it lives, and the newest start wins.

main.py's learner holds `learner.lock` to its end. Locks do not reach everywhere (another machine,
some network file systems), so every start claims its number as well: it creates a file that is not
there yet, which one learner alone can. ledger.py looks for a later claim before each write: a
learner that was stopped, replaced and continued finds one, and writes nothing more.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
import weakref
from pathlib import Path

from agent_r1.learner.stop_rules import RunFailedError
from agent_r1.runtime.files.run_folder import LOCK_FILE, STARTS_DIR
from agent_r1.runtime.files.writing import report_full_disk

logger = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class TakenOverError(RunFailedError):
    """A later start of the learner has taken over the run: this one must write nothing more."""


def writer_of(folder: Path) -> str | None:
    """Return the learner of this machine that holds a run folder; None where none does."""
    path = folder / LOCK_FILE
    try:
        inode = path.stat().st_ino
        # Taking the lock to find out could turn away a learner that begins at this moment.
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    held = any("FLOCK" in line and f":{inode} " in line for line in locks)
    return _holder(path) if held else None


def _holder(path: Path) -> str:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return f"process {values['pid']} on {values['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"see {path}"


def _this_process() -> bytes:
    """Return what lock and claims say of their holder."""
    values = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    return (json.dumps(values) + "\n").encode()


def newest_claim(folder: Path) -> int:
    """Return the highest number of a start that was claimed in a run folder; 0 without one."""
    claims = (folder / STARTS_DIR).glob("*.json")
    return max((int(path.stem) for path in claims if path.stem.isdigit()), default=0)


def claim_start(folder: Path, number: int) -> None:
    """Take the number of a start; of learners that try at the same moment, exactly one gets it.

    Raises:
        ValueError: another learner has it; the message names it.
        DiskFullError: there is no room.
    """
    path = folder / STARTS_DIR / f"{number:06d}.json"
    with report_full_disk("the claim of a start", path):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as exc:
            raise ValueError(
                f"start {number} of the run in {folder} was taken by another learner at the same "
                f"moment ({_holder(path)}); let it run, or stop it and try again"
            ) from exc
        with open(descriptor, "wb") as file:
            file.write(_this_process())


class FolderLock:
    """The lock of one run folder; it goes with this object at the latest."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._close: weakref.finalize[..., FolderLock] | None = None

    def acquire(self) -> None:
        """Take the lock; again is no harm.

        Raises:
            ValueError: another process has it; the message names it.
        """
        if self._close is not None:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._lock(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._close = weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, _this_process())

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ValueError(
                f"another learner is writing into {self._path.parent}: {_holder(self._path)}; wait "
                "for its end or stop it (kill -9 if it was suspended), then try again"
            ) from exc
        except OSError as exc:
            if exc.errno not in _NO_LOCKS:
                raise
            logger.warning("the file system of the run folder has no locks path=%s", self._path)

    def release(self) -> None:
        """Give the lock back."""
        if self._close is not None:
            self._close()
            self._close = None
