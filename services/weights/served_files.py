"""Files that a service serves over HTTP: counted, and by what they hold instead of by a name.

The learner serves what a joining service needs this way; version_files.py serves by version.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from agent_r1_proto.run_bundle import FILE_PATH
from agent_r1_service.http.api import Route, describe

RANGE_ERRORS = {
    "206": "The range that the request names.",
    "400": "The range is malformed.",
    "416": "The file has no such range.",
}


class CountedFile(FileResponse):
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


class ContentFiles:
    """Files that are served under their SHA-256; nothing else is ever read."""

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}
        self.bytes_out = 0
        """Bytes of files sent so far."""

    def add(self, paths: Mapping[str, Path]) -> None:
        """Serve files, given by their SHA-256."""
        self._paths |= paths

    def add_route(self, app: FastAPI) -> None:
        """Serve the files in an application."""

        @app.get(FILE_PATH, response_class=FileResponse)
        async def run_file(sha256: str) -> Response:
            path = self._paths.get(sha256)
            if path is None or not path.is_file():
                raise HTTPException(404, "no such file belongs to this run")
            return CountedFile(path, self._count)

        errors = RANGE_ERRORS | {"404": "No file of the run has this checksum."}
        describe(app, (Route(FILE_PATH, "get", errors=errors),))

    def _count(self, sent: int) -> None:
        self.bytes_out += sent
