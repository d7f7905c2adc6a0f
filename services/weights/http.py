"""Transport `http`: pulls versions from the learner, and from servers that have parts of them.

Reads manifest and snapshot over HTTP into a folder of this server's own, on tmpfs or a disk, and
serves what it has to the other servers. Only the newest version is kept.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import httpx
from fastapi import FastAPI
from pydantic import ValidationError

from agent_r1.weights.chunks import PartialFile, TransferError, reserve
from agent_r1.weights.download import Download, pull_client
from agent_r1.weights.manifest import (
    MAX_MANIFEST_BYTES,
    WeightsRefusedError,
    check_manifest,
    manifest_location,
)
from agent_r1.weights.version_files import WeightFiles, file_url
from agent_r1_proto.registry import Registry
from agent_r1_proto.weights import (
    DELTA_FILE,
    SNAPSHOT_FILE,
    FileChunks,
    NewestVersion,
    WeightDelta,
    WeightManifest,
)
from agent_r1_service.files.own_folder import OwnFolder, remove_left_behind
from agent_r1_service.files.room import readable_size, require_room
from agent_r1_service.http.token import RunToken

logger = logging.getLogger(__name__)

ROOM_REMEDY = "set rollout.weights_dir to a folder with room for two versions"

_PREFIX = "agent_r1_weights_"


def require_room_for_versions(parent: Path | None, num_values: int, dtype: str) -> None:
    """Refuse to start a server whose versions will not fit: the one in use and the next.

    What servers that were killed have left there is removed first.

    Args:
        parent: as for HttpFetcher.
        num_values: of the model's weights.
        dtype: of the weights.

    Raises:
        ValueError: there is too little room.
    """
    size_bytes = num_values * (4 if dtype == "float32" else 2)
    what = f"two weight versions of {readable_size(size_bytes)}"
    folder = parent or Path(tempfile.gettempdir())
    remove_left_behind(folder, _PREFIX)
    require_room(what, folder, 2 * size_bytes, ROOM_REMEDY)


class HttpFetcher(AbstractAsyncContextManager["HttpFetcher"]):
    """Pulls versions into a folder that goes with it; implements `Fetcher`.

    Args:
        registry: knows the other servers.
        run_id: snapshots of another run are refused.
        server_id: name of this server.
        parent: the folder is made in here; None is the system's folder for temporary files.
        timeout_s: longest one pull may take, in seconds.
        token: what learner and other servers ask for.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        run_id: str,
        server_id: str,
        parent: Path | None,
        timeout_s: float,
        token: RunToken | None,
    ) -> None:
        self._registry = registry
        self._run_id = run_id
        self._server_id = server_id
        self._timeout_s = timeout_s
        self._own_folder = OwnFolder(parent, _PREFIX)
        self._folder = self._own_folder.path
        self._client = pull_client(token)
        self._partial: tuple[int, PartialFile] | None = None
        """The version that was asked for last."""
        self._complete: int | None = None
        """The version that was complete last."""
        self.files = WeightFiles()
        """What other servers may take from this one."""

    async def __aenter__(self) -> Self:
        """Return the fetcher."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close connections and remove the folder."""
        await self._client.aclose()
        await asyncio.to_thread(self._own_folder.remove)

    def add_routes(self, app: FastAPI) -> None:
        """Serve what is here to the other servers."""
        self.files.add_route(app)

    def check_location(self, location: str) -> None:
        """See `Fetcher.check_location`."""
        if urlsplit(location).scheme not in ("http", "https"):
            raise WeightsRefusedError(
                "the location of the weights is no URL, and this server has learner.transport = "
                '"http"; learner and rollout servers need the same'
            )

    async def fetch(self, newest: NewestVersion) -> WeightManifest:
        """See `Fetcher.fetch`; a pull that ended early is continued by the next one."""
        version = newest.policy_version
        try:
            async with asyncio.timeout(self._timeout_s):
                manifest = await self._read_manifest(newest)
                if version != self._complete and not await self._pull_delta(newest, manifest):
                    await self._pull(newest, await asyncio.to_thread(self._open, manifest))
        except TimeoutError as exc:
            raise WeightsRefusedError(
                f"weights of version {version} did not arrive within {self._timeout_s:g} s "
                "(rollout.weight_load_timeout_s); the next attempt continues"
            ) from exc
        except TransferError as exc:
            raise WeightsRefusedError(str(exc)) from exc
        self._complete = version
        await asyncio.to_thread(self._keep_only, version)
        return manifest.model_copy(update={"location": str(self._path(version))})

    async def _read_manifest(self, newest: NewestVersion) -> WeightManifest:
        url = manifest_location(newest)
        self.check_location(url)
        try:
            async with self._client.stream("GET", url) as response:
                if response.status_code != httpx.codes.OK:
                    raise WeightsRefusedError(f"the manifest {url}: HTTP {response.status_code}")
                content = bytearray()
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > MAX_MANIFEST_BYTES:
                        raise WeightsRefusedError(
                            f"the manifest {url} has more than {MAX_MANIFEST_BYTES} bytes"
                        )
            manifest = WeightManifest.model_validate_json(bytes(content))
        except httpx.HTTPError as exc:
            raise WeightsRefusedError(
                f"the manifest {url} cannot be read ({type(exc).__name__} {exc}); see whether the "
                "learner runs and its learner.server can be reached from here"
            ) from exc
        except ValidationError as exc:
            raise WeightsRefusedError(
                f"the manifest {url} does not parse ({exc.error_count()} problems); learner and "
                "rollout servers must be of the same release"
            ) from exc
        check_manifest(manifest, url, policy_version=newest.policy_version, run_id=self._run_id)
        if manifest.location != SNAPSHOT_FILE or manifest.chunks is None:
            raise WeightsRefusedError(f"the manifest {url} is not one for pulls over HTTP")
        return manifest

    def _open(self, manifest: WeightManifest) -> PartialFile:
        """Return the file of a version, with what an earlier attempt has brought of it."""
        version = manifest.policy_version
        if self._partial is not None and self._partial[0] == version:
            return self._partial[1]
        assert manifest.chunks is not None  # _read_manifest has checked it
        file = self._new_file(version, SNAPSHOT_FILE, manifest.size_bytes, manifest.chunks)
        self._partial = version, file
        return file

    def _new_file(
        self, version: int, name: str, size_bytes: int, chunks: FileChunks
    ) -> PartialFile:
        self._keep_only(self._complete, version)
        self._path(version).parent.mkdir(exist_ok=True)
        file = PartialFile(self._path(version).with_name(name), size_bytes, chunks, ROOM_REMEDY)
        self.files.add(version, file.path, file.holds)
        return file

    async def _pull_delta(self, newest: NewestVersion, manifest: WeightManifest) -> bool:
        """Make a version of the one that is here; False where it is to be pulled whole."""
        delta, version = manifest.delta, manifest.policy_version
        if delta is None or delta.base_version != self._complete:
            return False
        try:
            file = await asyncio.to_thread(
                self._new_file, version, DELTA_FILE, delta.size_bytes, delta.chunks
            )
            await self._pull(newest, file)
            await asyncio.to_thread(self._apply, delta, file.path, manifest)
        except (WeightsRefusedError, ValueError, OSError) as exc:
            logger.warning(
                "the delta cannot be used, the version is pulled whole policy_version=%d error=%s",
                version,
                exc,
            )
            return False
        return True

    def _apply(self, delta: WeightDelta, path: Path, manifest: WeightManifest) -> None:
        # Not at the top: other pushes need no zstd.
        from agent_r1.weights.delta import apply_delta

        target = self._path(manifest.policy_version)
        reserve(target, manifest.size_bytes, ROOM_REMEDY)
        base = self._path(delta.base_version)
        apply_delta(base, path, delta.frames, manifest.tensors, target)
        self.files.add(manifest.policy_version, target)

    def _path(self, version: int) -> Path:
        return self._folder / f"v{version}" / SNAPSHOT_FILE

    async def _pull(self, newest: NewestVersion, file: PartialFile) -> None:
        servers = await self._registry.rollout_servers()
        peers = {
            server.server_id: file_url(server.url, newest.policy_version, file.path.name)
            for server in servers
            if server.server_id != self._server_id
        }
        url = manifest_location(newest).rpartition("/")[0] + f"/{file.path.name}"
        await Download(self._client, file, url, peers, self._server_id).run()

    def _keep_only(self, *versions: int | None) -> None:
        """Remove the files of all other versions."""
        for directory in self._folder.glob("v*"):
            if directory.name not in [f"v{version}" for version in versions]:
                self.files.remove(int(directory.name[1:]))
                shutil.rmtree(directory, ignore_errors=True)
