"""A run's files over HTTP: learner's server --`GET /run/store`--> `Mirror` --> a folder to read.

For the console where no folder is shared. The learner serves what people and tools read of a run
folder, and nothing else; a mirror fetches what is new into the user's cache, where a run is read as
from its own folder, also when the learner is gone.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import httpx
from fastapi import FastAPI, HTTPException, Query
from fastapi.responses import FileResponse, Response
from starlette.concurrency import run_in_threadpool

from agent_r1.runs.index import cache_folder
from agent_r1.runtime.files.private import private_folder
from agent_r1.runtime.files.run_folder import (
    ANSWERS_FILE,
    CONDITIONS_FILE,
    CONFIG_FILE,
    DEAD_LETTERS_FILE,
    EVALUATIONS_FILE,
    FAILURES_FILE,
    METRICS_FILE,
    STARTS_DIR,
    SUMMARY_FILE,
    TRAJECTORIES_DIR,
)
from agent_r1.runtime.files.writing import replace_file
from agent_r1.runtime.http import MAX_DETAIL_CHARS
from agent_r1.runtime.http.api import Route, describe, json_response
from agent_r1.runtime.http.token import TOKEN_SOURCES, RunToken, token_headers
from agent_r1_proto.messages import Message

logger = logging.getLogger(__name__)

LIST_PATH = "/run/store"
FILE_PATH = "/run/store/{path}"
FILES = (
    *(CONFIG_FILE, METRICS_FILE, EVALUATIONS_FILE, ANSWERS_FILE, FAILURES_FILE, CONDITIONS_FILE),
    *(DEAD_LETTERS_FILE, SUMMARY_FILE),
)
GROWING = (METRICS_FILE, EVALUATIONS_FILE, FAILURES_FILE, CONDITIONS_FILE)
"""Those to which lines are only added, until a resume writes them anew."""
FOLDERS = {TRAJECTORIES_DIR: (".parquet", ".jsonl"), STARTS_DIR: (".json",)}
"""Folders of a run, and what their files are called at the end."""
POLL_S = 2.0
"""Time between two looks at a learner."""
FIRST_LOOK_S = STOP_S = 5.0
"""Longest wait for the first look, and for a fetch under way when a mirror ends."""
FOLLOWED_S = 10.0
"""Time since its last look for which a mirror is waited for."""
LAST_LOOK_S = 6.0
"""Longest wait of a learner that has ended for mirrors that lack what it wrote last."""
TIMEOUT = httpx.Timeout(15.0, connect=5.0)
OVERLAP = 1024
"""Bytes of a file that grows that are fetched again: others there mean that it was written anew."""


class RunFile(Message):
    """One file of a run folder."""

    path: str
    """Below the run folder, with `/` between folder and name."""
    size_bytes: int
    modified_ns: int
    """Unix time of its last change."""


class RunFiles(Message):
    """Answer of `GET /run/store`."""

    name: str
    """Name of the run folder."""
    files: list[RunFile]
    """Files of the folder itself, then the others, the newest first."""


def _is_served(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    inside = name[:1] not in ("", ".") and "\0" not in name
    return path in FILES or (inside and name.endswith(FOLDERS.get(folder, ())))


def list_files(folder: Path) -> RunFiles:
    """Return what is served of a run folder."""
    found = [one for below in ("", *FOLDERS) for one in _files(folder, below)]
    found.sort(key=lambda one: ("/" in one.path, -one.modified_ns, one.path))
    return RunFiles(name=folder.name, files=found)


def _files(folder: Path, below: str) -> Iterator[RunFile]:
    """Yield the files of a folder; links may lead out of it."""
    try:
        entries = os.scandir(folder / below)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            path = f"{below}/{entry.name}" if below else entry.name
            if _is_served(path) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # the learner has removed it since
                    status = entry.stat(follow_symlinks=False)
                    size, modified = status.st_size, status.st_mtime_ns
                    yield RunFile(path=path, size_bytes=size, modified_ns=modified)


def digest_of(files: Iterable[RunFile]) -> str:
    """Return a digest of names, sizes and times of files."""
    lines = sorted(f"{one.path} {one.size_bytes} {one.modified_ns}" for one in files)
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


class Followers:
    """The mirrors of a run folder, as they ask for it, and whether they have all of it."""

    def __init__(self) -> None:
        self._asked_at: dict[str, float] = {}
        self._behind: set[str] = set()
        self._none_behind = asyncio.Event()

    def note(self, mirror: str, *, has_all: bool) -> None:
        """Note that a mirror has asked, and whether it has every file as it is now."""
        now = time.monotonic()
        self._asked_at[mirror] = now
        self._asked_at = {m: at for m, at in self._asked_at.items() if now - at < FOLLOWED_S}
        if has_all:
            self._behind.discard(mirror)
        if not self._behind:
            self._none_behind.set()

    async def have_all(self) -> None:
        """Wait until those that ask have what was written last: nobody serves it later."""
        now = time.monotonic()
        self._behind = {m for m, at in self._asked_at.items() if now - at < FOLLOWED_S}
        if not self._behind:
            return
        self._none_behind.clear()
        try:
            await asyncio.wait_for(self._none_behind.wait(), LAST_LOOK_S)
        except TimeoutError:
            logger.warning(
                "consoles that follow this run may lack its end mirrors=%d waited_s=%g",
                len(self._behind),
                LAST_LOOK_S,
            )


def add_store_routes(app: FastAPI, folder: Path) -> Followers:
    """Serve the files of a run folder, to be read only."""
    folder, followers = folder.resolve(), Followers()

    @app.get(LIST_PATH)
    async def listing(
        mirror: Annotated[str, Query(max_length=64)] = "",
        has: Annotated[str, Query(max_length=64)] = "",
    ) -> Response:
        listed = await run_in_threadpool(list_files, folder)
        if mirror:
            followers.note(mirror, has_all=has == digest_of(listed.files))
        return json_response(listed)

    @app.get("/run/store/{path:path}", response_class=FileResponse)
    def file(path: str) -> Response:
        where = folder / path
        if not _is_served(path) or where.is_symlink() or not where.is_file():
            raise HTTPException(404, "this file is not here")
        return FileResponse(where, media_type="application/octet-stream")

    errors = {"206": "The range that the request names.", "404": "The file is not here."}
    errors |= {"400": "The range is malformed.", "416": "The file has no such range."}
    describe(
        app, (Route(LIST_PATH, "get", answer=RunFiles), Route(FILE_PATH, "get", errors=errors))
    )
    return followers


class Mirror:
    """The runs that a learner's address has served, in a folder of this machine.

    Args:
        url: base URL of the learner's server.
        token: the run token.
        cache: folder of the mirrors; the user's by default.

    Raises:
        ValueError: the folder cannot be used.
    """

    def __init__(self, url: str, token: RunToken | None, cache: Path | None = None) -> None:
        self.url = url.rstrip("/")
        digest = hashlib.blake2b(self.url.encode(), digest_size=8).hexdigest()
        self.folder = (cache or cache_folder().with_name("mirrors")) / digest
        """Folder of the runs, each under its own name."""
        try:
            private_folder(self.folder)
        except OSError as exc:
            raise ValueError(
                f"the folder {self.folder} cannot be used ({exc}); set XDG_CACHE_HOME to a folder "
                "on this machine that you can write to"
            ) from exc
        self._client = httpx.Client(
            headers=token_headers(token), timeout=TIMEOUT, trust_env=False, base_url=self.url
        )
        self._stop = threading.Event()
        self._id = secrets.token_hex(8)
        self._run = ""
        self._answered_at: float | None = None
        self._problem = ""
        self._left = 0

    @property
    def notice(self) -> str:
        """What readers must know: since when the learner is gone, what is not here yet; or ""."""
        if self._problem:
            since = "has not answered yet"
            if self._answered_at is not None:
                at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._answered_at))
                since = f"has not answered since {at}; this is what it had then"
            return f"{self.url} {since} ({self._problem})"
        return f"{self._left} files of {self.url} are not here yet" if self._left else ""

    def at_work(self, name: str) -> str | None:
        """Return who trains a run; None where its learner does not answer."""
        is_there = name == self._run and not self._problem
        return f"the learner at {self.url}" if is_there else None

    @contextmanager
    def following(self) -> Generator[None]:
        """Look at the learner again and again, in a thread, while the block lasts.

        The block waits for the first look, so that a console has a run to show.
        """
        looked = threading.Event()

        def follow() -> None:
            self.refresh()
            looked.set()
            while not self._stop.wait(0 if self._left and not self._problem else POLL_S):
                self.refresh()

        thread = threading.Thread(target=follow, name="mirror", daemon=True)
        thread.start()
        looked.wait(FIRST_LOOK_S)
        try:
            yield
        finally:
            self._stop.set()
            thread.join(STOP_S)
            self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def refresh(self) -> None:
        """Fetch what is new for a while, and note it where that fails."""
        try:
            with (self.folder / ".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # several consoles may follow one learner
                if self._fetch_new():
                    # At once: the learner waits for those that lack what it wrote last.
                    self._fetch_new()
        except (httpx.HTTPError, ValueError, OSError) as exc:
            self._note(_explain(exc))
        else:
            self._note("")

    def _note(self, problem: str) -> None:
        if problem and not self._problem:
            logger.warning("the learner cannot be followed url=%s: %s", self.url, problem)
        self._problem = problem

    def _fetch_new(self) -> bool:
        """Fetch what is new, for POLL_S at most; return whether anything was."""
        own = list_files(self.folder / self._run).files if self._run else []
        asked = {"mirror": self._id, "has": digest_of(own)}
        answer = self._client.get(LIST_PATH, params=asked).raise_for_status()
        listed = RunFiles.model_validate_json(answer.content)
        if Path(listed.name).name != listed.name or listed.name in ("", ".", ".."):
            raise ValueError(f"its run folder has the name {listed.name!r}, which is none")
        self._answered_at, self._problem = time.time(), ""
        folder = self.folder / listed.name
        for below in FOLDERS:
            private_folder(folder / below)
            for half in (folder / below).glob(".*.tmp"):  # what a crash has left
                half.unlink(missing_ok=True)
        known = {one.path: one for one in list_files(folder).files}
        wanted = {one.path: one for one in listed.files if _is_served(one.path)}
        new = [one for path, one in wanted.items() if known.get(path) != one]
        self._run, self._left = listed.name, len(new)
        for path in known.keys() - wanted.keys():
            (folder / path).unlink(missing_ok=True)
        until = time.monotonic() + POLL_S
        for one in new:
            # What the learner writes last must not wait for all that it wrote before.
            if self._stop.is_set() or time.monotonic() > until:
                break
            if one.path in GROWING and self._append(folder / one.path, one):
                os.utime(folder / one.path, ns=(one.modified_ns, one.modified_ns))
            else:
                self._fetch(folder / one.path, one)
            self._left -= 1
        return bool(new)

    def _append(self, file: Path, one: RunFile) -> bool:
        """Add what a file lacks; False where it is not the beginning of the learner's."""
        if not file.is_file() or not 0 < file.stat().st_size <= one.size_bytes:
            return False
        with file.open("r+b") as lines:
            start = max(0, lines.seek(0, os.SEEK_END) - OVERLAP)
            lines.seek(start)
            tail = lines.read()
            wanted = f"bytes={start}-{one.size_bytes - 1}"
            answer = self._client.get(f"{LIST_PATH}/{quote(one.path)}", headers={"range": wanted})
            if answer.status_code != 206 or not answer.content.startswith(tail):
                return False
            lines.write(answer.content[len(tail) :])
        return True

    def _fetch(self, file: Path, one: RunFile) -> None:
        with self._client.stream("GET", f"{LIST_PATH}/{quote(one.path)}") as answer:
            if answer.status_code == 404:  # the learner has removed it since
                return
            answer.raise_for_status()
            with replace_file(file, mode=0o600) as output:
                for part in answer.iter_bytes():
                    output.write(part)
        # What has changed since it was listed has another time then, and is fetched again.
        os.utime(file, ns=(one.modified_ns, one.modified_ns))


def _explain(exc: Exception) -> str:
    if isinstance(exc, httpx.HTTPStatusError):
        status = exc.response.status_code
        if status == 401:
            return f"it asks for the run's token; set {TOKEN_SOURCES}"
        return f"it answers with status {status}; name the server of a learner of this version"
    return str(exc)[:MAX_DETAIL_CHARS] or type(exc).__name__
