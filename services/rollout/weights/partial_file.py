"""A file that arrives in chunks, in any order, each verified before it counts."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from agent_r1.rollout.policy import WeightsRefusedError
from agent_r1_proto.weights import FileChunks

MIB = 1 << 20


class PartialFile:
    """A file of known size; its chunks that are there can be read already.

    Args:
        path: is created at its full size.
        size_bytes: of the file.
        chunks: what the chunks must be.

    Raises:
        WeightsRefusedError: there is no room for it, or the chunks are not those of such a size.
    """

    def __init__(self, path: Path, size_bytes: int, chunks: FileChunks) -> None:
        self.path = path
        self._size = size_bytes
        self._chunks = chunks
        if len(chunks.sha256) != -(-size_bytes // chunks.size_bytes):
            raise WeightsRefusedError(
                f"{path.name} has {size_bytes} bytes, and its manifest names {len(chunks.sha256)} "
                f"chunks of {chunks.size_bytes} bytes; it must be one that the learner wrote"
            )
        self.missing = set(range(len(chunks.sha256)))
        reserve(path, size_bytes)

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


def reserve(path: Path, size_bytes: int) -> None:
    """Create a file whose room on the disk is taken.

    Raises:
        WeightsRefusedError: there is no room for it.
    """
    free = shutil.disk_usage(path.parent).free
    problem = f"{path} needs {size_bytes / MIB:.0f} MiB, and {free / MIB:.0f} MiB are free"
    remedy = "free some, or set rollout.weights_dir to a folder with room for two versions"
    if free < size_bytes:
        raise WeightsRefusedError(f"{problem}; {remedy}")
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as exc:
        path.unlink(missing_ok=True)
        raise WeightsRefusedError(f"{problem}: {exc.strerror}; {remedy}") from exc
