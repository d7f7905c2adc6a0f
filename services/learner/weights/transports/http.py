"""Transport `http`: rollout servers pull the files of published versions from the learner.

Reads the folder that publisher.py wrote, adds the checksums of the snapshot's chunks to the
manifest, and serves the two files by `GET` with ranges. Nothing is shared but the network.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Self

from fastapi import FastAPI

from agent_r1_proto.weights import MANIFEST_FILE, SNAPSHOT_FILE, FileChunks, WeightManifest
from agent_r1_service.config import ListenConfig
from agent_r1_service.files import write_atomically
from agent_r1_service.run_token import RunToken
from agent_r1_service.serving import advertised_url, bind, serving
from agent_r1_service.weight_files import WeightFiles, file_url

NAME = "learner.weights_server"
CHUNK_BYTES = 4 << 20
"""Large enough for the speed of the network, small enough for 90 MB to have 20 of them."""


class HttpTransport(AbstractAsyncContextManager["HttpTransport"]):
    """An HTTP server for the files of published versions; implements `Transport`.

    Args:
        listen: where it listens.
        token: what every request must have.
    """

    def __init__(self, listen: ListenConfig, token: RunToken | None) -> None:
        self._listen = listen
        self._token = token
        self._url = ""
        self._open = AsyncExitStack()
        self.files = WeightFiles()

    async def __aenter__(self) -> Self:
        """Start to serve.

        Raises:
            ValueError: the address cannot be bound, is open to other machines without a token, or
                must be advertised under another name.
        """
        listener = bind(NAME, self._listen, self._token)
        self._open.callback(listener.close)
        try:
            self._url = advertised_url(NAME, self._listen, listener.getsockname()[1])
            app = FastAPI(title="Agent-R1 learner weights", docs_url=None, redoc_url=None)
            self.files.add_route(app)
            await self._open.enter_async_context(serving(app, listener, self._listen, self._token))
        except BaseException:
            await self._open.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Stop to serve; pulls under way are cut off."""
        await self._open.aclose()

    async def publish(self, policy_version: int, directory: Path) -> str:
        """Serve a version; return the URL of its manifest."""
        await asyncio.to_thread(describe_chunks, directory)
        for name in (MANIFEST_FILE, SNAPSHOT_FILE):
            self.files.add(policy_version, directory / name)
        return file_url(self._url, policy_version, MANIFEST_FILE)

    def withdraw(self, policy_version: int) -> None:
        """Serve a version to no one new."""
        self.files.remove(policy_version)


def describe_chunks(directory: Path) -> WeightManifest:
    """Rewrite the manifest in a folder for pulls over HTTP, and return it."""
    manifest_file = directory / MANIFEST_FILE
    manifest = WeightManifest.model_validate_json(manifest_file.read_bytes())
    manifest = manifest.model_copy(
        update={
            "transport": "http",
            "location": SNAPSHOT_FILE,
            "chunks": hash_chunks(directory / SNAPSHOT_FILE, CHUNK_BYTES),
        }
    )
    write_atomically(manifest_file, manifest.model_dump_json(indent=1))
    return manifest


def hash_chunks(path: Path, chunk_bytes: int) -> FileChunks:
    """Return the checksums of a file's chunks."""
    with path.open("rb") as file:
        digests = [
            hashlib.sha256(chunk).hexdigest() for chunk in iter(lambda: file.read(chunk_bytes), b"")
        ]
    return FileChunks(size_bytes=chunk_bytes, sha256=digests)
