"""A small reverse proxy in front of a real Elasticsearch, for what that cannot be made to do.

It counts requests and answers some itself: overload, delays, failed shards, and what X-Pack
security does (the test server has none): credentials and TLS. It runs in threads, so blocking and
asynchronous clients of the same test reach it.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

FORWARD_TIMEOUT_S = 60.0
HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}


@dataclass
class Asked:
    """One request."""

    method: str
    path: str
    """Without the query."""
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """One answer."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(
        default_factory=lambda: {
            "content-type": "application/json",
            "x-elastic-product": "Elasticsearch",
        }
    )

    @classmethod
    def of(cls, status: int, value: Any) -> Answer:
        """Return a JSON answer."""
        return cls(status, json.dumps(value).encode())

    def json(self) -> Any:
        """Return the body's value."""
        return json.loads(self.body)


def error_answer(status: int, kind: str, reason: str) -> Answer:
    """Return an error as Elasticsearch words it."""
    error = {"type": kind, "reason": reason}
    return Answer.of(status, {"error": {"root_cause": [error], **error}, "status": status})


class Front:
    """The proxy; `before` may answer itself, `after` may change the real answer.

    Args:
        upstream: base URL of the real server.
        tls: serve HTTPS with this context.
    """

    def __init__(self, upstream: str, tls: ssl.SSLContext | None = None) -> None:
        self.asked: list[Asked] = []
        self.before: Callable[[Asked], Answer | None] = lambda _: None
        self.after: Callable[[Asked, Answer], Answer] = lambda _, answer: answer
        self._upstream = urlsplit(upstream)
        self._tls = tls
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Its own base URL."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    def count(self, ending: str) -> int:
        """Return how many requests had a path with this ending."""
        return sum(one.path.endswith(ending) for one in list(self.asked))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Serve, on the port of last time if there was one."""
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # headers and body in one packet
            disable_nagle_algorithm = True

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except (ConnectionError, ssl.SSLError):
                    self.close_connection = True

            def answer(self) -> None:
                size = int(self.headers.get("content-length", 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                path = self.path.partition("?")[0]
                asked = Asked(self.command, path, headers, self.rfile.read(size))
                front.asked.append(asked)
                answer = front.before(asked)
                if answer is None:
                    answer = front.after(asked, front.forward(asked, self.path))
                if front._server is None:  # stopped meanwhile
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body)

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = answer  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        server.daemon_threads = True
        server.block_on_close = False
        if self._tls is not None:
            server.socket = self._tls.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._port = server.server_address[1]
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving; connections that wait for an answer are closed without one."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.shutdown()
        server.server_close()
        if self._thread is not None:
            self._thread.join(FORWARD_TIMEOUT_S)

    def forward(self, asked: Asked, target: str) -> Answer:
        """Ask the real server."""
        host, port = self._upstream.hostname, self._upstream.port
        assert host is not None
        connection = http.client.HTTPConnection(host, port, timeout=FORWARD_TIMEOUT_S)
        try:
            headers = {k: v for k, v in asked.headers.items() if k not in HOP_HEADERS}
            connection.request(asked.method, target, asked.body or None, headers)
            response = connection.getresponse()
            body = response.read()
            kept = {
                name.lower(): value
                for name, value in response.getheaders()
                if name.lower() not in HOP_HEADERS
            }
            return Answer(response.status, body, kept)
        finally:
            connection.close()
