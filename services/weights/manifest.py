"""The server's end of a transport: brings published versions to this machine.

rollout/weight_versions.py asks for the version that the registry calls the newest, and gets a
manifest whose snapshot is a file here. The other end is `agent_r1.learner.weights.transports`.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from fastapi import FastAPI

from agent_r1_proto.weights import NewestVersion, WeightManifest

MAX_MANIFEST_BYTES = 64 * 2**20
"""A tensor takes about 200 bytes there; models have hundreds to tens of thousands."""


class WeightsRefusedError(ValueError):
    """A version cannot be had, or does not fit the model; the weights in use stay in use."""


class Fetcher(AbstractAsyncContextManager["Fetcher"], Protocol):
    """Brings versions to this machine while its context lasts."""

    def add_routes(self, app: FastAPI) -> None:
        """Let other servers take from this one, where the transport has that."""
        ...

    def check_location(self, location: str) -> None:
        """Check that a manifest's location is one of this transport.

        Raises:
            WeightsRefusedError: it is not.
        """
        ...

    async def fetch(self, newest: NewestVersion) -> WeightManifest:
        """Return a version's manifest; its `location` is the path of a file that is complete.

        Raises:
            WeightsRefusedError: manifest or snapshot cannot be had; nothing has changed.
        """
        ...


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


def check_manifest(
    manifest: WeightManifest, where: str, *, policy_version: int, run_id: str
) -> None:
    """Check that a manifest describes the version asked for.

    Raises:
        WeightsRefusedError: it is of another version or run.
    """
    if manifest.run_id != run_id:
        raise WeightsRefusedError(
            f"the manifest {where} is of another run; this server serves {run_id!r}"
        )
    if manifest.policy_version != policy_version:
        raise WeightsRefusedError(
            f"the manifest {where} is of another version than {policy_version}, which was asked for"
        )
