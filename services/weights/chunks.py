"""Chunks of a file: their checksums, and a file that arrives chunk by chunk, in any order.

The learner describes the files it serves by `hash_chunks`; download.py writes a `PartialFile`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from agent_r1.runtime.files.room import free_bytes
from agent_r1.runtime.memory import MIB
from agent_r1_proto.weights import FileChunks

CHUNK_BYTES = 4 * MIB
"""Large enough for the speed of the network, small enough for 90 MB to have 20 of them."""


class TransferError(ValueError):
    """A file cannot be had; the text says why and what to do."""


def hash_chunks(path: Path) -> FileChunks:
    """Return the checksums of a file's chunks."""
    with path.open("rb") as file:
        digests = [
            hashlib.sha256(chunk).hexdigest() for chunk in iter(lambda: file.read(CHUNK_BYTES), b"")
        ]
    return FileChunks(size_bytes=CHUNK_BYTES, sha256=digests)


class PartialFile:
    """A file of known size; its chunks that are there can be read already.

    Args:
        path: is created at its full size.
        size_bytes: of the file.
        chunks: what the chunks must be.
        remedy: what to do where there is no room.

    Raises:
        TransferError: there is no room for it, or the chunks are not those of such a size.
    """

    def __init__(self, path: Path, size_bytes: int, chunks: FileChunks, remedy: str) -> None:
        self.path = path
        self._size = size_bytes
        self._chunks = chunks
        if len(chunks.sha256) != -(-size_bytes // chunks.size_bytes):
            raise TransferError(
                f"{path.name} has {size_bytes} bytes, and its manifest names {len(chunks.sha256)} "
                f"chunks of {chunks.size_bytes} bytes; it must be one that the learner wrote"
            )
        self.missing = set(range(len(chunks.sha256)))
        reserve(path, size_bytes, remedy)

    def span(self, index: int) -> tuple[int, int]:
        """Return where a chunk lies: [start, end)."""
        start = index * self._chunks.size_bytes
        return start, min(start + self._chunks.size_bytes, self._size)

    def holds(self, start: int, end: int) -> bool:
        """Say whether all chunks that touch [start, end) are there."""
        if not 0 <= start < end <= self._size:
            return False
        size = self._chunks.size_bytes
        return self.missing.isdisjoint(range(start // size, (end - 1) // size + 1))

    def write(self, index: int, data: bytes) -> bool:
        """Put a chunk in its place; False says that these are not its bytes."""
        if hashlib.sha256(data).hexdigest() != self._chunks.sha256[index]:
            return False
        with self.path.open("r+b") as file:
            file.seek(self.span(index)[0])
            file.write(data)
        self.missing.discard(index)
        return True


def reserve(path: Path, size_bytes: int, remedy: str) -> None:
    """Create a file whose room on the disk is taken.

    Raises:
        TransferError: there is no room for it.
    """
    free = free_bytes(path.parent)
    problem = f"{path} needs {size_bytes / MIB:.0f} MiB, and {free / MIB:.0f} MiB are free"
    if free < size_bytes:
        raise TransferError(f"{problem}; free some, or {remedy}")
    try:
        with path.open("wb") as file:
            if size_bytes:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as exc:
        path.unlink(missing_ok=True)
        raise TransferError(f"{problem}: {exc.strerror}; free some, or {remedy}") from exc
