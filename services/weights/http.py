"""Transport `http`: rollout servers pull versions from the learner, and from each other.

The learner adds a delta to the version before where that is configured, and serves the files. A
server pulls them into a folder of its own, on tmpfs or a disk, and serves what it has to the
others. Only the newest version is kept there. Nothing is shared but the network.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self
from urllib.parse import urlsplit

import httpx
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from agent_r1.runtime.files.disk_space import readable_size, require_room
from agent_r1.runtime.files.own_folder import OwnFolder, remove_left_behind
from agent_r1.runtime.files.writing import write_atomically
from agent_r1.runtime.http.api import Route, describe
from agent_r1.runtime.http.token import RunToken
from agent_r1.weights.download import (
    Download,
    PartialFile,
    TransferError,
    pull_client,
    reserve,
)
from agent_r1.weights.manifest import (
    MAX_MANIFEST_BYTES,
    Fetcher,
    Published,
    SnapshotTransport,
    WeightsRefusedError,
    manifest_location,
    parse_manifest,
    time_limit_s,
)
from agent_r1_proto.registry import Registry
from agent_r1_proto.run_bundle import FILE_PATH
from agent_r1_proto.weights import (
    DELTA_FILE,
    MANIFEST_FILE,
    SNAPSHOT_FILE,
    FileChunks,
    NewestVersion,
    WeightDelta,
    WeightManifest,
)

logger = logging.getLogger(__name__)

ROOM_REMEDY = "set rollout.weights_dir to a folder with room for two versions"

WEIGHTS_PATH = "/weights/files/{version}/{name}"
_PREFIX = "agent_r1_weights_"
_ONE_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_FILE_ERRORS = {
    "206": "The range that the request names.",
    "400": "The range is malformed.",
    "404": "The file, or this range of it, is not here.",
    "416": "The file has no such range.",
}


def file_url(base_url: str, policy_version: int, name: str) -> str:
    """Return where a service serves a file of a version."""
    return base_url.rstrip("/") + WEIGHTS_PATH.format(version=policy_version, name=name)


class _FileAnswer(FileResponse):
    """A file that is sent in larger pieces than usual, and counted."""

    chunk_size = 1 << 20

    def __init__(self, path: Path, count: Callable[[int], None]) -> None:
        super().__init__(path, media_type="application/octet-stream", stat_result=os.stat(path))
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            await send(message)
            self._count(len(message.get("body", b"")))

        await super().__call__(scope, receive, counted)


@dataclass(frozen=True)
class _ServedFile:
    path: Path
    holds: Callable[[int, int], bool] | None


class ServedFiles:
    """Files that a service serves, whole or by ranges; no other file is ever read.

    A key is (version, name) for weights, and (SHA-256,) for what joining services need.
    """

    def __init__(self) -> None:
        self.bytes_out = 0
        """Bytes of files sent so far."""
        self._files: dict[tuple[int | str, ...], _ServedFile] = {}

    def add(
        self, *key: int | str, path: Path, holds: Callable[[int, int], bool] | None = None
    ) -> None:
        """Serve a file.

        Args:
            key: of the file.
            path: of the file.
            holds: says of a file that is not complete whether bytes [start, end) are there.
        """
        self._files[key] = _ServedFile(path, holds)

    def remove(self, version: int) -> None:
        """Serve no file of a version any more; who reads one already may read to its end."""
        self._files = {key: file for key, file in self._files.items() if key[0] != version}

    def add_weights_route(self, app: FastAPI) -> None:
        """Serve files of weight versions in an application."""

        @app.get(WEIGHTS_PATH, response_class=FileResponse)  # of a type by the file's name
        async def weight_file(version: int, name: str, request: Request) -> Response:
            return self._answer((version, name), request)

        describe(app, (Route(WEIGHTS_PATH, "get", errors=_FILE_ERRORS),))

    def add_run_route(self, app: FastAPI) -> None:
        """Serve files of the run in an application."""

        @app.get(FILE_PATH, response_class=FileResponse)
        async def run_file(sha256: str, request: Request) -> Response:
            return self._answer((sha256,), request)

        describe(app, (Route(FILE_PATH, "get", errors=_FILE_ERRORS),))

    def _answer(self, key: tuple[int | str, ...], request: Request) -> Response:
        file = self._files.get(key)
        if file is None or not file.path.is_file():
            raise HTTPException(404, "this file is not here")
        if file.holds is not None:
            wanted = _ONE_RANGE.fullmatch(request.headers.get("range", ""))
            if wanted is None or not file.holds(int(wanted[1]), int(wanted[2]) + 1):
                raise HTTPException(404, "this range of the file is not here yet")
        return _FileAnswer(file.path, self._count)

    def _count(self, sent: int) -> None:
        self.bytes_out += sent


class Server(Protocol):
    """The learner's server."""

    app: FastAPI
    url: str
    """Base URL, once it serves."""


class HttpTransport(SnapshotTransport):
    """The learner's end: serves the files of published versions.

    Args:
        server: gets the routes.
        dense_every: one version in so many has no delta; 1 makes none.
    """

    def __init__(self, server: Server, *, dense_every: int) -> None:
        self._server = server
        self._dense_every = dense_every
        self._previous: Path | None = None
        self._deltas = 0
        """Versions with a delta since the last one without."""
        self._bytes_taken = 0
        self.files = ServedFiles()
        self.run_files = ServedFiles()
        """Files for services that join the run, which `take_bytes_sent` does not count."""

    async def __aenter__(self) -> Self:
        """Add the routes, which end with the server."""
        self.files.add_weights_route(self._server.app)
        self.run_files.add_run_route(self._server.app)
        return self

    async def publish(self, policy_version: int, directory: Path) -> Published:
        """See `SnapshotTransport.publish`; the location is a URL."""
        base = self._previous
        again = base == directory  # a version that is written again has no other before it
        if again or self._deltas + 1 >= self._dense_every:
            base = None
        manifest = await asyncio.to_thread(describe_files, directory, base)
        self._deltas = 0 if manifest.delta is None else self._deltas + 1
        self._previous = directory
        for name in (MANIFEST_FILE, SNAPSHOT_FILE, *((DELTA_FILE,) if manifest.delta else ())):
            self.files.add(policy_version, name, path=directory / name)
        logger.info(
            "weights are served policy_version=%d dense_bytes=%d delta_bytes=%s",
            policy_version,
            manifest.size_bytes,
            manifest.delta and manifest.delta.size_bytes,
        )
        url = file_url(self._server.url, policy_version, MANIFEST_FILE)
        return Published(url, (manifest.delta or manifest).size_bytes)

    def take_bytes_sent(self) -> int:
        """See `Transport.take_bytes_sent`."""
        before, self._bytes_taken = self._bytes_taken, self.files.bytes_out
        return self._bytes_taken - before

    def serve(self, paths: Mapping[str, Path]) -> str:
        """See `Transport.serve`."""
        for sha256, path in paths.items():
            self.run_files.add(sha256, path=path)
        return self._server.url

    def withdraw(self, policy_version: int) -> None:
        """See `Transport.withdraw`."""
        self.files.remove(policy_version)


def describe_files(directory: Path, base: Path | None = None) -> WeightManifest:
    """Rewrite the manifest in a folder for pulls over HTTP, and return it.

    Args:
        directory: of the version.
        base: of the version before, to which a delta is made; None makes none.
    """
    manifest = _own_manifest(directory)
    manifest = manifest.model_copy(
        update={
            "transport": "http",
            "location": SNAPSHOT_FILE,
            "delta": None if base is None else _make_delta(base, directory, manifest),
        }
    )
    write_atomically(directory / MANIFEST_FILE, manifest.model_dump_json(indent=1))
    return manifest


def _own_manifest(directory: Path) -> WeightManifest:
    return WeightManifest.model_validate_json((directory / MANIFEST_FILE).read_bytes())


def _make_delta(base: Path, directory: Path, manifest: WeightManifest) -> WeightDelta:
    # Not at the top: other pushes need no zstd.
    from agent_r1.weights.delta import write_delta

    path = directory / DELTA_FILE
    files = base / SNAPSHOT_FILE, directory / SNAPSHOT_FILE
    frames, chunks = write_delta(*files, manifest.tensors, path)
    return WeightDelta(
        base_version=_own_manifest(base).policy_version,
        size_bytes=path.stat().st_size,
        chunks=chunks,
        frames=frames,
    )


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


class HttpFetcher(Fetcher):
    """The server's end: pulls versions into a folder that goes with it.

    Args:
        registry: knows the other servers.
        run_id: snapshots of another run are refused.
        server_id: name of this server.
        parent: the folder is made in here; None is the system's folder for temporary files.
        timeout_s: longest one pull may take, in seconds, and a second more for every 50 MB.
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
        self._folder = OwnFolder(parent, _PREFIX)
        self._client = pull_client(token)
        self._partial: tuple[int, PartialFile] | None = None
        """The version asked for last, and its file."""
        self._complete: int | None = None
        """The last complete version."""
        self.files = ServedFiles()
        """Files that other servers may take from this one."""

    async def __aexit__(self, *exc_info: object) -> None:
        """Close connections and remove the folder."""
        await self._client.aclose()
        await asyncio.to_thread(self._folder.remove)

    def add_routes(self, app: FastAPI) -> None:
        """Serve what is here to the other servers."""
        self.files.add_weights_route(app)

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
            async with asyncio.timeout(self._timeout_s) as limit:
                manifest = await self._read_manifest(newest)
                more_s = time_limit_s(0.0, manifest.size_bytes)
                limit.reschedule((limit.when() or 0.0) + more_s)
                if version != self._complete and not await self._pull_delta(newest, manifest):
                    await self._pull(newest, await asyncio.to_thread(self._open, manifest))
        except TimeoutError as exc:
            raise WeightsRefusedError(
                f"weights of version {version} did not arrive within {self._timeout_s:g} s and one "
                "more for every 50 MB (rollout.weight_load_timeout_s); the next attempt continues"
            ) from exc
        except TransferError as exc:
            raise WeightsRefusedError(str(exc)) from exc
        self._complete = version
        await asyncio.to_thread(self._keep_only, version)
        return manifest.model_copy(update={"location": str(self._path(version))})

    async def _read_manifest(self, newest: NewestVersion) -> WeightManifest:
        url = manifest_location(newest)
        self.check_location(url)
        content = bytearray()
        try:
            async with self._client.stream("GET", url) as response:
                if response.status_code != httpx.codes.OK:
                    raise WeightsRefusedError(f"the manifest {url}: HTTP {response.status_code}")
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > MAX_MANIFEST_BYTES:
                        raise WeightsRefusedError(
                            f"the manifest {url} has more than {MAX_MANIFEST_BYTES} bytes"
                        )
        except httpx.HTTPError as exc:
            raise WeightsRefusedError(
                f"the manifest {url} cannot be read ({type(exc).__name__} {exc}); see whether the "
                "learner runs and its learner.server can be reached from here"
            ) from exc
        manifest = parse_manifest(bytes(content), url, newest, self._run_id)
        if manifest.transport != "http" or manifest.location != SNAPSHOT_FILE:
            raise WeightsRefusedError(f"the manifest {url} is not one for pulls over HTTP")
        return manifest

    def _open(self, manifest: WeightManifest) -> PartialFile:
        """Return the file of a version, with what an earlier attempt has brought of it."""
        version = manifest.policy_version
        if self._partial is not None and self._partial[0] == version:
            return self._partial[1]
        assert manifest.chunks is not None  # as every manifest of this transport has
        file = self._new_file(version, SNAPSHOT_FILE, manifest.size_bytes, manifest.chunks)
        self._partial = version, file
        return file

    def _new_file(
        self, version: int, name: str, size_bytes: int, chunks: FileChunks
    ) -> PartialFile:
        self._keep_only(self._complete, version)
        path = self._path(version).with_name(name)
        path.parent.mkdir(exist_ok=True)
        file = PartialFile(path, size_bytes, chunks, ROOM_REMEDY)
        self.files.add(version, name, path=path, holds=file.holds)
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
        except (ValueError, OSError) as exc:
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
        apply_delta(base, path, delta.frames, manifest, target)
        self.files.add(manifest.policy_version, SNAPSHOT_FILE, path=target)

    def _path(self, version: int) -> Path:
        return self._folder.path / f"v{version}" / SNAPSHOT_FILE

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
        for directory in self._folder.path.glob("v*"):
            if directory.name not in [f"v{version}" for version in versions]:
                self.files.remove(int(directory.name[1:]))
                shutil.rmtree(directory, ignore_errors=True)
