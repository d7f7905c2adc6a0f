"""Transport `file`: manifest and snapshot lie in a folder that learner and this server see.

What comes from elsewhere, links included, is refused.
"""

from __future__ import annotations

import asyncio
import os
import stat
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from fastapi import FastAPI
from pydantic import ValidationError

from agent_r1.weights.manifest import (
    MAX_MANIFEST_BYTES,
    WeightsRefusedError,
    check_manifest,
    manifest_location,
)
from agent_r1_proto.weights import NewestVersion, WeightManifest


class FileFetcher(AbstractAsyncContextManager["FileFetcher"]):
    """Reads manifests below one folder; implements `Fetcher`.

    Args:
        weights_dir: snapshots and manifests elsewhere are refused.
        run_id: snapshots of another run are refused.
    """

    def __init__(self, weights_dir: Path, run_id: str) -> None:
        self._weights_dir = weights_dir
        self._run_id = run_id

    async def __aexit__(self, *exc_info: object) -> None:
        """Leave the files, which are the learner's."""

    def add_routes(self, app: FastAPI) -> None:
        """Add none: the other servers see the same folder."""

    def check_location(self, location: str) -> None:
        """See `Fetcher.check_location`."""
        real_path(location, self._weights_dir)

    async def fetch(self, newest: NewestVersion) -> WeightManifest:
        """See `Fetcher.fetch`."""
        return await asyncio.to_thread(
            read_manifest,
            manifest_location(newest),
            policy_version=newest.policy_version,
            run_id=self._run_id,
            weights_dir=self._weights_dir,
        )


def read_manifest(
    location: str, *, policy_version: int, run_id: str, weights_dir: Path
) -> WeightManifest:
    """Read a manifest and check that it describes the version asked for.

    What a refusal says never quotes the file: whoever asks for a load need not be allowed to read.

    Args:
        location: path of the manifest.
        policy_version: the version it must describe.
        run_id: the run it must belong to.
        weights_dir: manifest and snapshot must lie below this folder.

    Returns:
        The manifest; its location is the real path of the snapshot.

    Raises:
        WeightsRefusedError: it is missing, elsewhere, too large, does not parse, or is of another
            version or run.
    """
    path = real_path(location, weights_dir)
    try:
        manifest = WeightManifest.model_validate_json(_read_small_file(path))
    except OSError as exc:
        raise WeightsRefusedError(
            f"the manifest {path} cannot be read ({exc.strerror}); the learner's weights_dir must "
            "be a folder that this server sees under the same path"
        ) from exc
    except ValidationError as exc:
        raise WeightsRefusedError(
            f"the manifest {path} does not parse ({exc.error_count()} problems); it must be one "
            "that the learner wrote"
        ) from None  # the cause would quote the file in the log
    except ValueError as exc:
        raise WeightsRefusedError(f"the manifest {exc}") from exc
    check_manifest(manifest, str(path), policy_version=policy_version, run_id=run_id)
    snapshot = real_path(manifest.location, weights_dir)
    return manifest.model_copy(update={"location": str(snapshot)})


def real_path(location: str, weights_dir: Path) -> Path:
    """Return where a path leads, links followed.

    Raises:
        WeightsRefusedError: it leads out of `weights_dir`.
    """
    try:
        path = Path(location).resolve()
        inside = path.is_relative_to(weights_dir.resolve())
    except (OSError, RuntimeError, ValueError) as exc:  # a loop of links, a zero byte
        raise WeightsRefusedError("the location of the weights is not a usable path") from exc
    if not inside:
        raise WeightsRefusedError(
            f"the location {location} does not lie in {weights_dir}, where this server takes "
            "weights from; learner.weights_dir (or run.dir) must be the same for learner and "
            "rollout"
        )
    return path


def _read_small_file(path: Path) -> bytes:
    """Read a regular file that must not be large.

    Raises:
        ValueError: it is no regular file, or too large.
    """
    # Without O_NONBLOCK a named pipe would hold up the open itself.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file")
        if status.st_size > MAX_MANIFEST_BYTES:
            raise ValueError(
                f"{path} has {status.st_size} bytes; a manifest has at most {MAX_MANIFEST_BYTES}"
            )
        return file.read(MAX_MANIFEST_BYTES)
