"""How a published version reaches the rollout servers: one interface, one file a transport.

publisher.py writes a version into a folder and hands it to the transport of `learner.transport`,
which says where servers find its manifest. The other end is `agent_r1.rollout.weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.server import LearnerServer
from agent_r1.learner.weights.transports.base import Published
from agent_r1.learner.weights.transports.file import FileTransport
from agent_r1.learner.weights.transports.http import HttpTransport


class Transport(AbstractAsyncContextManager["Transport"], Protocol):
    """Makes versions available while its context lasts."""

    async def publish(self, policy_version: int, directory: Path) -> Published:
        """Make a version available.

        Args:
            policy_version: its number.
            directory: holds manifest and snapshot, complete and on the disk.
        """
        ...

    def take_bytes_sent(self) -> int:
        """Return the bytes that this transport has sent since the last call."""
        ...

    def serve(self, paths: Mapping[str, Path]) -> str | None:
        """Serve files to services that join the run; return the base URL.

        Args:
            paths: by the SHA-256 of their content.

        Returns:
            None where the transport serves nothing.
        """
        ...

    def withdraw(self, policy_version: int) -> None:
        """Forget a version whose files are about to be deleted."""
        ...


def make_transport(config: LearnerConfig, server: LearnerServer) -> Transport:
    """Return the transport that the configuration names, not yet open."""
    if config.transport == "http":
        return HttpTransport(config, server)
    return FileTransport()
