"""Writing of files: whole or not at all, with checksums where a change must be found out.

A file or folder is written under a temporary name, synced and renamed into place; a full disk is
reported in one form. Every service and the launcher write through it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from agent_r1.runtime.files.disk_space import free_bytes, free_text, out_of_inodes
from agent_r1.runtime.memory import MIB

CHECKSUM_FILE = "checksums.json"
_OLDER = "resume from an older checkpoint of the run"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFullError(OSError):
    """The disk is full: a file was not written, and nothing that existed before was lost."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextlib.contextmanager
def report_full_disk(
    what: str, path: Path, need_bytes: int | None = None, remedy: str | None = None
) -> Generator[None]:
    """Turn a full disk inside the block into a DiskFullError that says what was not written.

    Args:
        what: what is being written, for the message.
        path: where; its file system's free space is reported.
        need_bytes: about how much is needed in all, in bytes, where that is known.
        remedy: what the user can do besides freeing space, for the message.
    """
    try:
        yield
    except DiskFullError:
        raise  # its message names the file
    except (OSError, RuntimeError) as exc:
        # torch.save reports a failed write as a RuntimeError; then free space tells.
        full = exc.errno in _FULL if isinstance(exc, OSError) else _is_full(path)
        if not full:
            raise
        raise _disk_full(what, path, need_bytes, remedy) from exc


def _is_full(path: Path) -> bool:
    return free_bytes(path) < MIB or out_of_inodes(path)


def require_space(what: str, path: Path, need_bytes: int, remedy: str) -> None:
    """Refuse to start writing what cannot fit.

    Raises:
        DiskFullError: less than `need_bytes` are free; nothing was written.
    """
    if free_bytes(path) < need_bytes:
        raise _disk_full(what, path, need_bytes, remedy)


def _disk_full(what: str, path: Path, need_bytes: int | None, remedy: str | None) -> DiskFullError:
    needs = "cannot be written"
    if need_bytes is not None:
        needs = f"needs about {need_bytes / MIB:.1f} MiB"
    return DiskFullError(
        errno.ENOSPC,
        f"the disk is full: {what} ({path}) {needs}, and {free_text(path)}; "
        "what was complete before is kept. Free space there" + (f", or {remedy}" if remedy else ""),
    )


@contextlib.contextmanager
def replace_file(path: Path, *, mode: int = 0o666) -> Generator[BinaryIO]:
    """Give a file that becomes `path`, on the disk, when the block ends without an error.

    Readers, and a crash, see the old file or the new one.

    Args:
        path: where; after an error what was there is untouched.
        mode: permissions from its first byte on, less the process's umask.

    Raises:
        DiskFullError: there is no room.
    """
    staging = _staging(path)
    with report_full_disk(path.name, path):
        try:
            staging.unlink(missing_ok=True)
            descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            staging.replace(path)
            sync_path(path.parent)
        finally:
            staging.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Write a whole file as `replace_file` does; text in UTF-8.

    Raises:
        DiskFullError: there is no room.
    """
    with replace_file(path, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _staging(path: Path) -> Path:
    """Return the temporary name of what becomes `path`: another process has another one."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextlib.contextmanager
def replace_directory(directory: Path) -> Generator[Path]:
    """Give a temporary directory that becomes `directory` when the block ends without an error.

    A directory already there is replaced; after an error it is untouched and the temporary one is
    removed.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = _staging(directory)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        put_in_place(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def put_in_place(finished: Path, directory: Path) -> None:
    """Let a finished directory beside `directory` become it, and take the place of one there."""
    replaced = directory.with_name(f".{directory.name}.{os.getpid()}.old")
    shutil.rmtree(replaced, ignore_errors=True)
    sync_tree(finished)
    if directory.exists():
        directory.rename(replaced)
    try:
        finished.rename(directory)
    except OSError:
        if replaced.exists():
            replaced.rename(directory)
        raise
    sync_path(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    sync_tree(directory)
    write_atomically(directory / CHECKSUM_FILE, text)


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.name != CHECKSUM_FILE:
            yield path
        elif path.is_dir():
            sealed = path / CHECKSUM_FILE
            yield from [sealed] if sealed.is_file() else _files(path)


def check_seal(directory: Path, facts: Mapping[str, Any] | None = None) -> None:
    """Check that a sealed directory is complete, unchanged, and has these facts.

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
        files = {name: (one["size_bytes"], one["sha256"]) for name, one in sealed["files"].items()}
        # By the last part of their names: a key may have been in another table.
        found_facts = {name.rpartition(".")[2]: value for name, value in sealed["facts"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"{checksum_file} is corrupted ({exc}); {_OLDER}") from exc
    for name, (size_bytes, sha256) in files.items():
        path = directory / name
        if not path.is_file():
            raise ValueError(f"{path} is missing from the checkpoint; {_OLDER}")
        size = path.stat().st_size
        if size != size_bytes:
            raise ValueError(
                f"{path} is corrupted: it has {size} bytes and was written with "
                f"{size_bytes}; {_OLDER}"
            )
        if hash_file(path) != sha256:
            raise ValueError(f"{path} is corrupted: its checksum differs; {_OLDER}")
    for name, value in (facts or {}).items():
        if (found := found_facts.get(name.rpartition(".")[2])) != value:
            raise ValueError(
                f"{directory} was written with {name} = {found} and this run has "
                f"{name} = {value}; set it back, or start from the checkpoint's model directory"
            )
