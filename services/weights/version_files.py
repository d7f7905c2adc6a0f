"""Weight files over HTTP, in whole or by ranges: what one service has, others pull.

The learner serves the versions it publishes, and every rollout server what it has of the version
that it pulls or holds, so that the others need not take all of it from the learner.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, Response

from agent_r1.weights.served_files import RANGE_ERRORS, CountedFile
from agent_r1_service.http.api import Route, describe

PATH = "/weights/files/{version}/{name}"
_ONE_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_ROUTE = Route(
    PATH,
    "get",
    errors=RANGE_ERRORS | {"404": "The file, or this range of it, is not here."},
)


def file_url(base_url: str, policy_version: int, name: str) -> str:
    """Return where a service serves a file of a version."""
    return base_url.rstrip("/") + PATH.format(version=policy_version, name=name)


@dataclass(frozen=True)
class _Served:
    path: Path
    holds: Callable[[int, int], bool] | None


class WeightFiles:
    """The files that a service serves; nothing else is ever read."""

    def __init__(self) -> None:
        self._served: dict[tuple[int, str], _Served] = {}
        self.bytes_out = 0
        """Bytes of files sent so far."""

    def add(
        self, version: int, path: Path, holds: Callable[[int, int], bool] | None = None
    ) -> None:
        """Serve a file under its name.

        Args:
            version: the weight version it belongs to.
            path: of the file.
            holds: says of a file that is not complete whether bytes [start, end) are there.
        """
        self._served[version, path.name] = _Served(path, holds)

    def remove(self, version: int) -> None:
        """Serve no file of a version any more; who reads one already may read to its end."""
        self._served = {key: one for key, one in self._served.items() if key[0] != version}

    def add_route(self, app: FastAPI) -> None:
        """Serve the files in an application."""

        @app.get(PATH, response_class=FileResponse)  # of a type by the file's name
        async def weight_file(version: int, name: str, request: Request) -> Response:
            served = self._served.get((version, name))
            if served is None or not served.path.is_file():
                raise HTTPException(404, "this file of this weight version is not here")
            if served.holds is not None:
                wanted = _ONE_RANGE.fullmatch(request.headers.get("range", ""))
                if wanted is None or not served.holds(int(wanted[1]), int(wanted[2]) + 1):
                    raise HTTPException(404, "this range of the file is not here yet")
            return CountedFile(served.path, self._count)

        describe(app, (_ROUTE,))

    def _count(self, sent: int) -> None:
        self.bytes_out += sent
