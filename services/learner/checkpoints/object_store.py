"""An object store behind a URL: run_store.py --bytes, files--> S3, Google Cloud, Azure, a folder.

A thin layer over obstore, the one client whose writes can be conditional on every store. It retries
while a store does not answer, and says in one line what is wrong and what to do. Credentials come
from the environment, or from the machine's role, and are never part of a URL or a message.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from uuid import uuid4

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 120.0
"""Longest for one request, which carries at most one part of a file."""
PART_BYTES = 32 * 1024 * 1024
MAX_PARTS = 9_000
"""Most parts of one object; S3 allows 10,000."""
PARALLEL = 8
"""Parts of a file on their way at a time."""

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT, the path of a key file",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""The variables that hold credentials, by scheme."""
_CHECK = {
    "s3": "check the network, the URL, and AWS_ENDPOINT_URL for a store that is not Amazon's",
    "file": "check that this folder can be written",
}
_NO_CREDENTIALS = ("/latest/", "metadata.google.internal", "Account must be specified")
"""Words of errors where nothing but the machine's own role is left to ask."""
_BAD_CREDENTIALS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "AccessDenied"}


class StoreError(OSError):
    """The object store cannot be used; what was complete there before is kept."""


class ObjectStore:
    """The objects below one URL; every call blocks, and may be made from any thread."""

    def __init__(self, url: str, *, retry_s: float) -> None:
        """Open a store; nothing is asked yet.

        Args:
            url: as `learner.checkpoint_url`, with the path that all objects lie below.
            retry_s: longest that one request is repeated while the store does not answer.

        Raises:
            StoreError: the package is missing, or the URL is incomplete.
        """
        self.url = url.rstrip("/")
        with self._explained():
            from obstore import exceptions  # not at the top: the other services do without it

            self._exceptions = exceptions
            self._store = _open(self.url, retry_s)

    def create(self, path: str, content: bytes) -> bool:
        """Write an object that nobody has written; False, and nothing is changed, if it exists."""
        with self._explained():
            try:
                self._store.put(path, content, mode="create")
            except self._exceptions.AlreadyExistsError:
                # A request that was repeated finds its own work.
                return self.read(path) == content
        return True

    def require_conditional_writes(self) -> None:
        """Make sure that of two writers who create one object, one fails.

        Raises:
            StoreError: both succeed, as with a server that ignores `If-None-Match`.
        """
        path = f".probe-{uuid4().hex}"
        self.create(path, b"1")
        try:
            if self.create(path, b"2"):
                raise StoreError(
                    f"{self.url} ignores conditional writes (If-None-Match), by which one learner "
                    "keeps out another; update that server, or use another store"
                )
        finally:
            self.delete([path])

    def write(self, path: str, content: bytes) -> None:
        """Write an object as a whole, in place of one that is there."""
        with self._explained():
            self._store.put(path, content)

    def read(self, path: str) -> bytes | None:
        """Return an object; None where there is none."""
        with self._explained():
            try:
                return bytes(self._store.get(path).bytes())
            except FileNotFoundError as exc:
                _raise_without_bucket(exc)
                return None

    def folders(self) -> list[str]:
        """Return the names of the folders right below the URL."""
        with self._explained():
            found = self._store.list_with_delimiter("")
        return [prefix.rpartition("/")[2] for prefix in found["common_prefixes"]]

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of every object below a folder, by its path from there."""
        with self._explained():
            found = [item for batch in self._store.list(folder) for item in batch]
        start = len(folder) + 1 if folder else 0
        return {item["path"][start:]: item["size"] for item in found}

    def upload(self, path: str, file: Path) -> None:
        """Write a file as one object, which appears when it is complete."""
        part = max(PART_BYTES, -(-file.stat().st_size // MAX_PARTS))
        with self._explained():
            self._store.put(path, file, chunk_size=part, max_concurrency=PARALLEL)

    def download(self, path: str, size: int, file: Path) -> None:
        """Write an object of `size` bytes into a file, several parts at a time."""

        def fetch(start: int) -> None:
            length = min(PART_BYTES, size - start)
            with self._explained():
                part = self._store.get_range(path, start=start, length=length)
            os.pwrite(descriptor, part, start)

        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            with ThreadPoolExecutor(PARALLEL) as threads:
                list(threads.map(fetch, range(0, size, PART_BYTES)))
        finally:
            os.close(descriptor)

    def delete(self, paths: list[str]) -> None:
        """Delete objects; those that are not there are no error."""
        for path in paths:
            with self._explained(), contextlib.suppress(FileNotFoundError):
                self._store.delete(path)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the client's errors into one line with a remedy."""
        try:
            yield
        except ImportError as exc:
            raise StoreError(
                f"{self.url} needs the package obstore; install it: pip install 'agent-r1[learner]'"
            ) from exc
        except StoreError:
            raise
        except Exception as exc:
            if isinstance(exc, self._exceptions.BaseError | OSError):
                raise StoreError(_explain(self.url, exc)) from exc
            raise


def _open(url: str, retry_s: float) -> Client:
    from obstore.store import LocalStore, from_url

    parts = urlsplit(url)
    if parts.scheme == "file":
        return LocalStore(parts.path, mkdir=True)
    return from_url(
        url,
        client_options={
            "allow_http": True,  # where AWS_ENDPOINT_URL says so: a store inside a cluster
            "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, retry_s)),
            "timeout": timedelta(seconds=min(REQUEST_TIMEOUT_S, max(retry_s, 1.0))),
        },
        retry_config={
            "max_retries": 1000,  # the time decides
            "retry_timeout": timedelta(seconds=retry_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=min(15.0, retry_s)),
                "base": 2,
            },
        },
    )


def _raise_without_bucket(exc: FileNotFoundError) -> None:
    if "<Code>NoSuchBucket</Code>" in str(exc):
        raise exc


def _explain(url: str, exc: Exception) -> str:
    parts = urlsplit(url)
    text = str(exc).partition("Debug source")[0].strip()
    found = re.search(r"<Code>(\w+)</Code>", text)
    code = "" if found is None else found[1]
    variables = CREDENTIALS.get(parts.scheme, CREDENTIALS["az"])
    if any(sign in text for sign in _NO_CREDENTIALS):
        return f"{url} needs credentials, and there are none; set {variables}"
    if code in _BAD_CREDENTIALS or type(exc).__name__ in (
        "UnauthenticatedError",
        "PermissionDeniedError",
    ):
        return (
            f"{url} refuses the credentials ({code or type(exc).__name__}); check {variables}, "
            "and that they may list, read, write and delete there"
        )
    if code == "NoSuchBucket":
        return f"{url}: there is no bucket {parts.netloc}; create it, or correct the URL"
    check = _CHECK.get(parts.scheme, "check the network and the URL")
    return f"{url} cannot be used: {code or _short(text)}; {check}. What was complete there is kept"


def _short(text: str) -> str:
    """Return the first line without the client's own numbers."""
    line = text.splitlines()[0] if text else "no reason given"
    line = re.sub(r"^.*?(?=Error performing [A-Z]+ )", "", line)
    return re.sub(r" in [\d.]+\w+, after (\d+) retries, .*? - ", r" after \1 retries: ", line)
