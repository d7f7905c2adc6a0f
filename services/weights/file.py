"""Transport `file`: learner and rollout servers see one folder, under the same path.

The learner leaves manifest and snapshot where it wrote them. A server refuses what lies elsewhere,
links included.
"""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

from agent_r1.weights.manifest import (
    MAX_MANIFEST_BYTES,
    Fetcher,
    Published,
    SnapshotTransport,
    WeightsRefusedError,
    manifest_location,
    parse_manifest,
)
from agent_r1_proto.weights import MANIFEST_FILE, SNAPSHOT_FILE, NewestVersion, WeightManifest


class FileTransport(SnapshotTransport):
    """The learner's end; has nothing to move."""

    async def publish(self, policy_version: int, directory: Path) -> Published:
        """See `SnapshotTransport.publish`; the location is a path."""
        size_bytes = (directory / SNAPSHOT_FILE).stat().st_size
        return Published(str(directory / MANIFEST_FILE), size_bytes)


class FileFetcher(Fetcher):
    """The server's end: reads manifests below one folder.

    Args:
        weights_dir: snapshots and manifests elsewhere are refused.
        run_id: snapshots of another run are refused.
    """

    def __init__(self, weights_dir: Path, run_id: str) -> None:
        self._weights_dir = weights_dir
        self._run_id = run_id

    def check_location(self, location: str) -> None:
        """See `Fetcher.check_location`."""
        self._real_path(location)

    async def fetch(self, newest: NewestVersion) -> WeightManifest:
        """See `Fetcher.fetch`; the location is the snapshot's real path."""
        return await asyncio.to_thread(self._read, newest)

    def _read(self, newest: NewestVersion) -> WeightManifest:
        path = self._real_path(manifest_location(newest))
        try:
            content = _read_small_file(path)
        except OSError as exc:
            raise WeightsRefusedError(
                f"the manifest {path} cannot be read ({exc.strerror}); the learner's weights_dir "
                "must be a folder that this server sees under the same path"
            ) from exc
        manifest = parse_manifest(content, str(path), newest, self._run_id)
        if manifest.transport != "file":
            raise WeightsRefusedError(
                f"the manifest {path} is for pulls over HTTP, and this server has "
                'learner.transport = "file"; learner and rollout servers need the same'
            )
        snapshot = self._real_path(manifest.location)
        return manifest.model_copy(update={"location": str(snapshot)})

    def _real_path(self, location: str) -> Path:
        """Return where a path leads, links followed.

        Raises:
            WeightsRefusedError: it leads out of the folder.
        """
        try:
            path = Path(location).resolve()
            inside = path.is_relative_to(self._weights_dir.resolve())
        except (OSError, RuntimeError, ValueError) as exc:  # a loop of links, a zero byte
            raise WeightsRefusedError("the location of the weights is not a usable path") from exc
        if not inside:
            raise WeightsRefusedError(
                f"the location {location} does not lie in {self._weights_dir}, where this server "
                "takes weights from; learner.weights_dir (or run.dir) must be the same for "
                "learner and rollout"
            )
        return path


def _read_small_file(path: Path) -> bytes:
    # Without O_NONBLOCK a named pipe would hold up the open itself.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise WeightsRefusedError(f"the manifest {path} is not a regular file")
        if status.st_size > MAX_MANIFEST_BYTES:
            raise WeightsRefusedError(
                f"the manifest {path} has {status.st_size} bytes; a manifest has at most "
                f"{MAX_MANIFEST_BYTES}"
            )
        return file.read(MAX_MANIFEST_BYTES)
