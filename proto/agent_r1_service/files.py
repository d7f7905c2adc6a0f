"""Files that survive a crash, and are found out when they were changed.

Written under a temporary name, synced, renamed into place; checksums beside them. The learner
writes weights and checkpoints through it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

CHECKSUM_FILE = "checksums.json"
_OLDER = "resume from an older checkpoint of the run"
_MIB = 1024 * 1024
_HASH_BLOCK = 4 * _MIB
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFullError(RuntimeError):
    """The disk is full: a file was not written, and nothing that existed before was lost."""


@contextlib.contextmanager
def report_full_disk(what: str, directory: Path, need_bytes: int, remedy: str) -> Generator[None]:
    """Turn a full disk inside the block into a DiskFullError that says how much is missing.

    Args:
        what: what is being written, for the message.
        directory: where; its file system's free space is reported.
        need_bytes: about how much is needed in all, in bytes.
        remedy: what the user can do, for the message.
    """
    try:
        yield
    except (OSError, RuntimeError) as exc:
        # torch.save reports a failed write as a RuntimeError; then free space tells.
        full = exc.errno in _FULL if isinstance(exc, OSError) else _free(directory) < _MIB
        if not full:
            raise
        raise DiskFullError(_full_message(what, directory, need_bytes, remedy)) from exc


def require_space(what: str, directory: Path, need_bytes: int, remedy: str) -> None:
    """Refuse to start writing what cannot fit.

    Raises:
        DiskFullError: less than `need_bytes` are free; nothing was written.
    """
    if _free(directory) < need_bytes:
        raise DiskFullError(_full_message(what, directory, need_bytes, remedy))


def _full_message(what: str, directory: Path, need_bytes: int, remedy: str) -> str:
    return (
        f"{what} needs about {need_bytes / _MIB:.1f} MiB in {directory} and "
        f"{_free(directory) / _MIB:.1f} MiB are free; free space there or {remedy}"
    )


def _free(directory: Path) -> int:
    """Return free bytes on the file system of `directory` or its nearest existing parent."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


@contextlib.contextmanager
def replace_directory(directory: Path) -> Generator[Path]:
    """Give a temporary directory that becomes `directory` when the block ends without an error.

    A directory already there is replaced; after an error it is untouched and the temporary one is
    removed.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    retired = directory.with_name(f".{directory.name}.{os.getpid()}.old")
    for leftover in (staging, retired):
        shutil.rmtree(leftover, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        sync_tree(staging)
        if directory.exists():
            directory.rename(retired)
        staging.rename(directory)
        sync_path(directory.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)


def sync_tree(directory: Path) -> None:
    """Flush every file and directory under `directory` to the disk."""
    for path in [*directory.rglob("*"), directory]:
        sync_path(path)


def sync_path(path: Path) -> None:
    """Flush one file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def seal(directory: Path, facts: dict[str, Any] | None = None) -> None:
    """Sync every file under `directory`, then write their checksums and `facts` beside them.

    A folder below that is sealed itself counts through its own checksums.

    Args:
        directory: its files are complete.
        facts: what a reader must match: ranks, stage, dtype.
    """
    files = {
        str(path.relative_to(directory)): {
            "size_bytes": path.stat().st_size,
            "sha256": hash_file(path),
        }
        for path in _files(directory)
    }
    text = json.dumps({"facts": facts or {}, "files": files}, indent=1, sort_keys=True)
    staged = directory / f"{CHECKSUM_FILE}.tmp"
    staged.write_text(text, encoding="utf-8")
    staged.rename(directory / CHECKSUM_FILE)
    sync_tree(directory)


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.name != CHECKSUM_FILE:
            yield path
        elif path.is_dir():
            sealed = path / CHECKSUM_FILE
            yield from [sealed] if sealed.is_file() else _files(path)


def check_seal(directory: Path) -> dict[str, Any]:
    """Check that a sealed directory is complete and unchanged; return its facts.

    Raises:
        ValueError: it is not; the message names the file and the remedy.
    """
    checksum_file = directory / CHECKSUM_FILE
    if not checksum_file.is_file():
        raise ValueError(
            f"{directory} has no {CHECKSUM_FILE}: the checkpoint was not finished; {_OLDER}"
        )
    try:
        sealed = json.loads(checksum_file.read_text(encoding="utf-8"))
        files, facts = dict(sealed["files"]), dict(sealed["facts"])
    except (ValueError, KeyError, TypeError) as exc:
        raise ValueError(f"{checksum_file} is corrupted ({exc}); {_OLDER}") from exc
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{path} is missing from the checkpoint; {_OLDER}")
        size = path.stat().st_size
        if size != expected["size_bytes"]:
            raise ValueError(
                f"{path} is corrupted: it has {size} bytes and was written with "
                f"{expected['size_bytes']}; {_OLDER}"
            )
        if hash_file(path) != expected["sha256"]:
            raise ValueError(f"{path} is corrupted: its checksum differs; {_OLDER}")
    return facts
