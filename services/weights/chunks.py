"""Chunks of a file and their checksums: a file is written and hashed in one pass, by threads.

snapshot.py and delta.py write with it on the learner and on servers, snapshot.py verifies what lies
in a shared folder, and download.py takes each chunk from another source.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

from agent_r1.runtime.memory import MIB
from agent_r1_proto.weights import FileChunks

T = TypeVar("T")

CHUNK_BYTES = 4 * MIB
"""Large enough for the speed of the network, small enough for 90 MB to have 20 of them."""
_THREADS = 4
_AHEAD = 2 * _THREADS
"""Chunks that wait for a thread, at most."""


def write_chunks(path: Path, parts: Iterable[memoryview]) -> FileChunks:
    """Write a file and return the checksums of its chunks.

    Args:
        path: of the file.
        parts: its bytes, in order; taken as they are needed, and not changed before the end.
    """
    with path.open("wb") as file:
        descriptor = file.fileno()
        chunks = enumerate(_cut(parts))
        digests = _in_threads(lambda one: _write(descriptor, one[0] * CHUNK_BYTES, one[1]), chunks)
        return FileChunks(size_bytes=CHUNK_BYTES, sha256=list(digests))


def hash_chunks(path: Path, chunk_bytes: int | None = None) -> FileChunks:
    """Return the checksums of a file's chunks, of CHUNK_BYTES unless told otherwise."""
    size_bytes = chunk_bytes or CHUNK_BYTES
    with path.open("rb") as file:
        descriptor = file.fileno()
        starts = range(0, os.fstat(descriptor).st_size, size_bytes)
        digests = _in_threads(
            lambda start: _digest(os.pread(descriptor, size_bytes, start)), starts
        )
        return FileChunks(size_bytes=size_bytes, sha256=list(digests))


def check_chunks(path: Path, chunks: FileChunks) -> None:
    """Read a file and check that it has these chunks.

    Raises:
        ValueError: it has others.
    """
    found = hash_chunks(path, chunks.size_bytes).sha256
    for i, (one, other) in enumerate(zip_longest(found, chunks.sha256)):
        if one != other:
            raise ValueError(
                f"{path}: the {chunks.size_bytes} bytes from {i * chunks.size_bytes} have another "
                "sha256 than its manifest says"
            )


def _cut(parts: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the parts of each chunk."""
    chunk: list[memoryview] = []
    room = CHUNK_BYTES
    for part in parts:
        rest = part
        while rest:
            chunk.append(rest[:room])
            rest, room = rest[room:], room - len(chunk[-1])
            if room == 0:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


def _write(descriptor: int, start: int, chunk: list[memoryview]) -> str:
    data = chunk[0] if len(chunk) == 1 else memoryview(b"".join(chunk))
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written:], start + written)
    return _digest(data)


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _in_threads(function: Callable[[T], str], arguments: Iterable[T]) -> Iterator[str]:
    """Yield the results in order; arguments are taken as threads come to them."""
    waiting: deque[Future[str]] = deque()
    with ThreadPoolExecutor(_THREADS) as pool:
        for argument in arguments:
            if len(waiting) == _AHEAD:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, argument))
        while waiting:
            yield waiting.popleft().result()
