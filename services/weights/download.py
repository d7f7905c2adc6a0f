"""Downloads: one file from the learner, and from the rollout servers that download it too.

The learner describes a file by the checksums of its chunks, which arrive in any order.
Each chunk is assigned to one server, which takes it from the learner; the others take it from that
server. So the learner sends the file about once, however many servers there are. Servers stop
asking a slow or faulty peer, and share its chunks among the rest.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections import deque
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

import httpx
from httpx_aiohttp import AiohttpTransport

from agent_r1.runtime.files.disk_space import free_bytes
from agent_r1.runtime.http.token import RunToken, token_headers
from agent_r1.runtime.memory import MIB
from agent_r1_proto.weights import FileChunks

logger = logging.getLogger(__name__)

PARALLEL = 4
"""Chunks on their way at a time."""
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 15.0
"""Longest silence of the learner within an answer."""
PEER_TIMEOUT_S = 15.0
"""Time a peer has for one chunk."""
PATIENCE_S = 2.0
"""Longest wait for a peer that lacks a chunk; or, if it is longer, `PATIENCE` of the time since the
download began."""
PATIENCE = 0.25
POLL_S = 0.05
"""Time between two questions to a peer that does not have a chunk yet."""
STALL_TIMEOUT_S = 30.0
"""Longest time without a chunk from anywhere while the learner fails; then the download ends."""
RETRY_S = 0.5
MAX_DAMAGED = 3
"""Chunks with a wrong checksum from the learner that end the download."""


class TransferError(ValueError):
    """A file cannot be had; the text says why and what to do."""


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


def pull_client(token: RunToken | None) -> httpx.AsyncClient:
    """Return a client for downloads, with the run's token."""
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    return httpx.AsyncClient(
        transport=AiohttpTransport(), timeout=timeout, headers=token_headers(token)
    )


class _NotThereYetError(Exception):
    """A peer does not have the chunk."""


class _SourceError(Exception):
    """A source could not be reached or sent something else."""


@dataclass(eq=False)
class Download:
    """One download of one file."""

    client: httpx.AsyncClient
    """Client with the run's token."""
    file: PartialFile
    """Receives the chunks; those it has are not asked for."""
    url: str
    """URL of the file at the learner."""
    peers: dict[str, str]
    """URL of the file at the other servers that are still asked, by name."""
    own_name: str
    """Name of this server."""
    _waited_since: dict[str, float] = field(default_factory=dict[str, float], init=False)
    _damaged: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Put the chunks in the order in which they are taken."""
        self._names = sorted({*self.peers, self.own_name})
        own_first = sorted(self.file.missing, key=lambda index: self._source(index) is not None)
        self._queue = deque(own_first)
        self._started = self._last_chunk = time.monotonic()

    async def run(self) -> None:
        """Return when the file is complete.

        Raises:
            TransferError: the learner does not have the file any more, does not answer, or
                sends other bytes than its manifest says. What has come stays in the file.
        """
        workers = {asyncio.create_task(self._work()) for _ in range(PARALLEL)}
        try:
            for worker in asyncio.as_completed(workers):
                await worker
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self) -> None:
        while self._queue:
            index = self._queue.popleft()
            source = self._source(index)
            if source is None:
                await self._take_from_learner(index)
            elif not await self._take_from_peer(index, source):
                self._queue.append(index)

    def _source(self, index: int) -> str | None:
        """Return the peer to ask for a chunk; None is the learner."""
        name = self._names[index % len(self._names)]
        if name != self.own_name and name not in self.peers:
            # All servers divide the chunks of a failed one in the same way.
            name = max([*self.peers, self.own_name], key=lambda one: _rank(index, one))
        return None if name == self.own_name else name

    async def _take_from_learner(self, index: int) -> None:
        while True:
            try:
                data = await self._get(self.url, index)
            except _NotThereYetError:
                raise TransferError(
                    f"{self.url} is not there: the learner has replaced it, or has ended"
                ) from None
            except _SourceError as exc:
                if time.monotonic() - self._last_chunk > STALL_TIMEOUT_S:
                    raise TransferError(
                        f"nothing of {self.file.path.name} came for {STALL_TIMEOUT_S:g} s: {exc}; "
                        "check that the learner is running and that its learner.server can be "
                        "reached from here"
                    ) from exc
                await asyncio.sleep(RETRY_S)
                continue
            if await self._write(index, data):
                return
            self._damaged += 1
            if self._damaged >= MAX_DAMAGED:
                raise TransferError(
                    f"{self.url}: {self._damaged} chunks had another sha256 than the manifest says"
                )

    async def _take_from_peer(self, index: int, peer: str) -> bool:
        """Take a chunk from a peer; False when it did not have it or failed."""
        try:
            async with asyncio.timeout(PEER_TIMEOUT_S):
                data = await self._get(self.peers[peer], index)
        except _NotThereYetError:
            await self._wait_for(peer)
            return False
        except (_SourceError, TimeoutError) as exc:
            self._drop(peer, f"{type(exc).__name__} {exc}")
            return False
        if not await self._write(index, data):
            self._drop(peer, f"chunk {index} had another sha256 than the manifest says")
            return False
        return True

    async def _wait_for(self, peer: str) -> None:
        now = time.monotonic()
        since = self._waited_since.setdefault(peer, now)
        if now - since > max(PATIENCE_S, PATIENCE * (since - self._started)):
            self._drop(peer, f"it keeps others waiting waited_s={now - since:.1f}")
        else:
            await asyncio.sleep(POLL_S)

    def _drop(self, peer: str, why: str) -> None:
        if self.peers.pop(peer, None) is not None:
            logger.warning("weights are not taken from a peer peer=%s reason=%s", peer, why)

    async def _write(self, index: int, data: bytes) -> bool:
        fits = await asyncio.to_thread(self.file.write, index, data)
        if fits:
            self._last_chunk = time.monotonic()
        return fits

    async def _get(self, url: str, index: int) -> bytes:
        """Return the bytes that a source has for a chunk.

        Raises:
            _NotThereYetError: the source says that it does not have them.
            _SourceError: it did not send as many.
        """
        start, end = self.file.span(index)
        headers = {"range": f"bytes={start}-{end - 1}", "accept-encoding": "identity"}
        data = bytearray()
        try:
            async with self.client.stream("GET", url, headers=headers) as response:
                if response.status_code == HTTPStatus.NOT_FOUND:
                    raise _NotThereYetError
                if response.status_code != HTTPStatus.PARTIAL_CONTENT:
                    raise _SourceError(f"{url}: HTTP {response.status_code}")
                async for piece in response.aiter_raw():
                    data += piece
                    if len(data) > end - start:
                        break
        except httpx.HTTPError as exc:
            raise _SourceError(f"{url}: {type(exc).__name__} {exc}") from exc
        if len(data) != end - start:
            raise _SourceError(f"{url}: {len(data)} bytes came of {end - start}")
        return bytes(data)


def _rank(index: int, name: str) -> bytes:
    return hashlib.blake2b(f"{index} {name}".encode(), digest_size=8).digest()
