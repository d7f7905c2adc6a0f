"""Files that a service serves over HTTP, in whole or by ranges; no other file is ever read.

The learner serves the versions it publishes, and what joining services need. A rollout server
serves what it has of the version it pulls or holds, so that the others need not take all of it from
the learner.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from agent_r1.runtime.http.api import Route, describe
from agent_r1_proto.run_bundle import FILE_PATH

WEIGHTS_PATH = "/weights/files/{version}/{name}"
_ONE_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_RANGE_ERRORS = {
    "206": "The range that the request names.",
    "400": "The range is malformed.",
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


class _Served:
    def __init__(self) -> None:
        self.bytes_out = 0
        """Bytes of files sent so far."""

    def _answer(self, path: Path | None, lacking: str) -> Response:
        if path is None or not path.is_file():
            raise HTTPException(404, lacking)
        return _FileAnswer(path, self._count)

    def _count(self, sent: int) -> None:
        self.bytes_out += sent


class ContentFiles(_Served):
    """Files that are served under their SHA-256."""

    def __init__(self) -> None:
        super().__init__()
        self._paths: dict[str, Path] = {}

    def add(self, paths: Mapping[str, Path]) -> None:
        """Serve files, given by their SHA-256."""
        self._paths |= paths

    def add_route(self, app: FastAPI) -> None:
        """Serve the files in an application."""

        @app.get(FILE_PATH, response_class=FileResponse)
        async def run_file(sha256: str) -> Response:
            return self._answer(self._paths.get(sha256), "no such file belongs to this run")

        _describe(app, FILE_PATH, "No file of the run has this checksum.")


@dataclass(frozen=True)
class _WeightFile:
    path: Path
    holds: Callable[[int, int], bool] | None


class WeightFiles(_Served):
    """Files of weight versions, which are served under version and name."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[tuple[int, str], _WeightFile] = {}

    def add(
        self, version: int, path: Path, holds: Callable[[int, int], bool] | None = None
    ) -> None:
        """Serve a file under its name.

        Args:
            version: the weight version it belongs to.
            path: of the file.
            holds: says of a file that is not complete whether bytes [start, end) are there.
        """
        self._files[version, path.name] = _WeightFile(path, holds)

    def remove(self, version: int) -> None:
        """Serve no file of a version any more; who reads one already may read to its end."""
        self._files = {key: file for key, file in self._files.items() if key[0] != version}

    def add_route(self, app: FastAPI) -> None:
        """Serve the files in an application."""

        @app.get(WEIGHTS_PATH, response_class=FileResponse)  # of a type by the file's name
        async def weight_file(version: int, name: str, request: Request) -> Response:
            file = self._files.get((version, name))
            if file is not None and file.holds is not None:
                wanted = _ONE_RANGE.fullmatch(request.headers.get("range", ""))
                if wanted is None or not file.holds(int(wanted[1]), int(wanted[2]) + 1):
                    raise HTTPException(404, "this range of the file is not here yet")
            return self._answer(file and file.path, "this file of this weight version is not here")

        _describe(app, WEIGHTS_PATH, "The file, or this range of it, is not here.")


def _describe(app: FastAPI, path: str, lacking: str) -> None:
    describe(app, (Route(path, "get", errors=_RANGE_ERRORS | {"404": lacking}),))
