"""A stand-in for S3 in this process: moto behind a socket, which a test can make fail.

It keeps objects in memory, honours conditional writes, and checks no signatures. It serves one
request at a time, so that a conditional write is one step as it is in S3.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

BUCKET = "runs"
ACCESS_KEY = "AKIASTANDIN"
SECRET_KEY = "wJalrXUtnFEMI-stand-in-secret"

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class S3Server:
    """Serves S3 at `endpoint`, with one bucket; a test may change how it answers at any time."""

    def __init__(self, app: Wsgi) -> None:
        self._app = app
        self.endpoint = ""
        self.requests: list[dict[str, str]] = []
        """Method, path and headers of every request."""
        self.failure: tuple[str, str] | None = None
        """Status line and S3 error code of every answer."""
        self.failures_left: int | None = None
        """So many answers fail, and then none; None is all of them."""
        self.ignores_conditions = False
        """Behave as a server that knows no conditional writes."""

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        condition = environ.get("HTTP_IF_NONE_MATCH", "")
        request = {"method": environ["REQUEST_METHOD"], "path": environ["PATH_INFO"]}
        self.requests.append(request | {"if_none_match": condition})
        if self.failure is not None and self.failures_left != 0:
            if self.failures_left is not None:
                self.failures_left -= 1
            status, code = self.failure
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start(status, [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()]
        if self.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        return self._app(environ, start)

    def environment(self) -> dict[str, str]:
        """Return the variables by which a client finds this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """Return what the bucket holds, by name."""
        from moto.backends import get_backend

        backend = get_backend("s3")["123456789012"]["aws"]
        keys = backend.buckets[BUCKET].keys
        return {name: keys[name].value for name in keys if name.startswith(prefix)}


def unload_moto() -> None:
    """Take moto and what it brings out of this process, for tests that start vLLM here later.

    A CPU engine looks at every object in every loaded module, and Flask's proxies raise when they
    are looked at outside a request.
    """
    for name in list(sys.modules):
        if name.partition(".")[0] in ("flask", "flask_cors", "moto", "werkzeug"):
            del sys.modules[name]


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run the stand-in until the block ends, with an empty bucket."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    front = S3Server(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, front, threaded=False)
    front.endpoint = f"http://127.0.0.1:{server.port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="s3")
    thread.start()
    try:
        bucket = f"{front.endpoint}/{BUCKET}"
        reset = urllib.request.Request(f"{front.endpoint}/moto-api/reset", b"", method="POST")
        for request in (reset, urllib.request.Request(bucket, b"", method="PUT")):
            urllib.request.urlopen(request).close()
        front.requests.clear()
        yield front
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
