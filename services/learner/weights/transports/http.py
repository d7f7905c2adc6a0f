"""Transport `http`: rollout servers pull the files of published versions from the learner.

Reads the folder that publisher.py wrote, adds the checksums of the snapshot's chunks to the
manifest, and a delta to the version before where that is configured, and serves the files by `GET`
with ranges. Nothing is shared but the network.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Self

from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.server import LearnerServer
from agent_r1.learner.weights.transports.base import Published
from agent_r1.weights.chunks import hash_chunks
from agent_r1.weights.served_files import ContentFiles
from agent_r1.weights.version_files import WeightFiles, file_url
from agent_r1_proto.weights import (
    DELTA_FILE,
    MANIFEST_FILE,
    SNAPSHOT_FILE,
    WeightDelta,
    WeightManifest,
)
from agent_r1_service.files.writing import write_atomically

logger = logging.getLogger(__name__)


class HttpTransport(AbstractAsyncContextManager["HttpTransport"]):
    """Serves the files of published versions; implements `Transport`.

    Args:
        config: whether deltas are made.
        server: of the learner, which gets the routes.
    """

    def __init__(self, config: LearnerConfig, server: LearnerServer) -> None:
        self._config = config
        self._server = server
        self._previous: Path | None = None
        self._deltas = 0
        """Versions with a delta since the last one without."""
        self._bytes_taken = 0
        self.files = WeightFiles()
        self.run_files = ContentFiles()
        """What services pull that join the run."""

    async def __aenter__(self) -> Self:
        """Add the routes."""
        self.files.add_route(self._server.app)
        self.run_files.add_route(self._server.app)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Leave the routes: they end with the server."""

    async def publish(self, policy_version: int, directory: Path) -> Published:
        """See `Transport.publish`; the location is a URL."""
        base = self._previous
        again = base == directory  # a version that is written again has no other before it
        if again or self._config.push == "dense" or self._deltas + 1 >= self._config.dense_every:
            base = None
        manifest = await asyncio.to_thread(describe_files, directory, base)
        self._deltas = 0 if manifest.delta is None else self._deltas + 1
        self._previous = directory
        for name in (MANIFEST_FILE, SNAPSHOT_FILE, DELTA_FILE):
            if name != DELTA_FILE or manifest.delta is not None:
                self.files.add(policy_version, directory / name)
        logger.info(
            "weights are served policy_version=%d dense_bytes=%d delta_bytes=%s",
            policy_version,
            manifest.size_bytes,
            manifest.delta and manifest.delta.size_bytes,
        )
        size_bytes = manifest.delta.size_bytes if manifest.delta else manifest.size_bytes
        return Published(file_url(self._server.url, policy_version, MANIFEST_FILE), size_bytes)

    def take_bytes_sent(self) -> int:
        """See `Transport.take_bytes_sent`."""
        before, self._bytes_taken = self._bytes_taken, self.files.bytes_out
        return self._bytes_taken - before

    def serve(self, paths: Mapping[str, Path]) -> str:
        """See `Transport.serve`."""
        self.run_files.add(paths)
        return self._server.url

    def withdraw(self, policy_version: int) -> None:
        """Serve a version to no one new."""
        self.files.remove(policy_version)


def describe_files(directory: Path, base: Path | None = None) -> WeightManifest:
    """Rewrite the manifest in a folder for pulls over HTTP, and return it.

    Args:
        directory: of the version.
        base: of the version before, to which a delta is made; None makes none.
    """
    manifest = _read_manifest(directory)
    manifest = manifest.model_copy(
        update={
            "transport": "http",
            "location": SNAPSHOT_FILE,
            "chunks": hash_chunks(directory / SNAPSHOT_FILE),
            "delta": None if base is None else _make_delta(base, directory, manifest),
        }
    )
    write_atomically(directory / MANIFEST_FILE, manifest.model_dump_json(indent=1))
    return manifest


def _read_manifest(directory: Path) -> WeightManifest:
    return WeightManifest.model_validate_json((directory / MANIFEST_FILE).read_bytes())


def _make_delta(base: Path, directory: Path, manifest: WeightManifest) -> WeightDelta:
    # Not at the top: other pushes need no zstd.
    from agent_r1.weights.delta import write_delta

    path = directory / DELTA_FILE
    frames = write_delta(base / SNAPSHOT_FILE, directory / SNAPSHOT_FILE, manifest.tensors, path)
    return WeightDelta(
        base_version=_read_manifest(base).policy_version,
        size_bytes=path.stat().st_size,
        chunks=hash_chunks(path),
        frames=frames,
    )
