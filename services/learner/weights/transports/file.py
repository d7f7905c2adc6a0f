"""Transport `file`: learner and rollout servers see the same folder, under the same path."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from agent_r1.learner.weights.transports.base import Published
from agent_r1_proto.weights import MANIFEST_FILE, SNAPSHOT_FILE


class FileTransport(AbstractAsyncContextManager["FileTransport"]):
    """The files are where they were written; implements `Transport`."""

    async def __aexit__(self, *exc_info: object) -> None:
        """Leave the files: servers may still read them."""

    async def publish(self, policy_version: int, directory: Path) -> Published:
        """See `Transport.publish`; the location is a path."""
        size_bytes = (directory / SNAPSHOT_FILE).stat().st_size
        return Published(str(directory / MANIFEST_FILE), size_bytes)

    def take_bytes_sent(self) -> int:
        """Return 0: servers read the files themselves."""
        return 0

    def serve(self, paths: Mapping[str, Path]) -> None:
        """Serve nothing."""

    def withdraw(self, policy_version: int) -> None:
        """Do nothing: a server that has the files open may read them to the end."""
