"""Manifests of weight versions, and the two ends of the transports that carry versions.

learner/weights/publisher.py hands every version to a `Transport`, which says where its manifest is.
rollout/weight_versions.py asks a `Fetcher` for the newest one, and gets a manifest whose snapshot
is a file on this machine. Each transport has both ends in one file: file.py, http.py,
collective.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from agent_r1_proto.weights import Invitation, NewestVersion, WeightManifest

if TYPE_CHECKING:  # learner ranks import this module through snapshot.py, and serve nothing
    from fastapi import FastAPI

MAX_MANIFEST_BYTES = 64 * 2**20
"""A tensor takes about 200 bytes there; models have hundreds to tens of thousands."""


SLOWEST_BYTES_PER_S = 50e6
"""Weights that are slower to travel or to be read may be given up; half a network of 1 Gbit/s."""


def time_limit_s(configured_s: float, size_bytes: int) -> float:
    """Return the time that something with so many bytes of weights may take.

    Args:
        configured_s: limit for weights of no size.
        size_bytes: of the weights.
    """
    return configured_s + size_bytes / SLOWEST_BYTES_PER_S


class WeightsRefusedError(ValueError):
    """A version cannot be had, or does not fit the model; the weights in use stay in use."""


class WeightsNotArrivedError(WeightsRefusedError):
    """A version did not arrive, and would another time: nothing is known to be wrong with it."""


@dataclass(frozen=True)
class Published:
    """A version that servers can fetch."""

    location: str
    """Location of its manifest."""
    size_bytes: int
    """Bytes for a server that holds the version before: of the delta where there is one, otherwise
    of the snapshot."""


class Transport(AbstractAsyncContextManager["Transport"]):
    """The learner's end: makes versions available while its context lasts."""

    async def __aexit__(self, *exc_info: object) -> None:
        """Leave what is published: servers may still read it."""

    def take_bytes_sent(self) -> int:
        """Return the bytes that this transport has sent since the last call."""
        return 0

    def serve(self, paths: Mapping[str, Path]) -> str | None:
        """Serve files to services that join the run; return the base URL.

        Args:
            paths: by the SHA-256 of their content.

        Returns:
            None where the transport serves nothing.
        """
        return None

    def withdraw(self, policy_version: int) -> None:
        """Forget a version whose files are about to be deleted; reads under way may end."""


class SnapshotTransport(Transport):
    """The learner's end of a transport that takes versions from their folders."""

    @abstractmethod
    async def publish(self, policy_version: int, directory: Path) -> Published:
        """Make a version available.

        Args:
            policy_version: its number.
            directory: holds manifest and snapshot, complete and on the disk.
        """


class Fetcher(AbstractAsyncContextManager["Fetcher"]):
    """The server's end: brings versions to this machine while its context lasts."""

    async def __aexit__(self, *exc_info: object) -> None:
        """Leave the files: they are the learner's."""

    def add_routes(self, app: FastAPI) -> None:
        """Let other servers take from this one, where the transport has that."""

    @abstractmethod
    def check_location(self, location: str) -> None:
        """Check that a manifest's location is one of this transport.

        Raises:
            WeightsRefusedError: it is not.
        """

    def accept(self, invitation: Invitation | None) -> None:
        """Take an invitation for the next fetch, where the learner sends what it publishes."""

    @abstractmethod
    async def fetch(self, newest: NewestVersion) -> WeightManifest:
        """Return a version's manifest; its `location` is the path of a file that is complete.

        Raises:
            WeightsRefusedError: manifest or snapshot cannot be had; nothing has changed.
        """


def manifest_location(newest: NewestVersion) -> str:
    """Return where the manifest of a version is.

    Raises:
        WeightsRefusedError: it has none.
    """
    if newest.manifest_location is None:
        raise WeightsRefusedError(
            f"version {newest.policy_version} is announced without a manifest; only version 0, "
            "the configured model, has none"
        )
    return newest.manifest_location


def parse_manifest(
    content: bytes, where: str, newest: NewestVersion, run_id: str
) -> WeightManifest:
    """Parse a manifest, and check that it describes the version asked for.

    A refusal never quotes it: whoever asks for a load need not be allowed to read the file.

    Raises:
        WeightsRefusedError: it does not parse, or is of another version or run.
    """
    try:
        manifest = WeightManifest.model_validate_json(content)
    except ValidationError as exc:
        raise WeightsRefusedError(
            f"the manifest {where} does not parse ({exc.error_count()} problems); it must be one "
            "that a learner of the same release wrote"
        ) from None  # the cause would quote it in the log
    if manifest.run_id != run_id:
        raise WeightsRefusedError(
            f"the manifest {where} is of another run; this server serves {run_id!r}"
        )
    if manifest.policy_version != newest.policy_version:
        raise WeightsRefusedError(
            f"the manifest {where} is of another version than {newest.policy_version}, which was "
            "asked for"
        )
    return manifest
