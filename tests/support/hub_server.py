"""A small server with the part of the Hugging Face hub's API that a download uses.

It stands for the hub in tests; nothing here has been compared with the hub itself.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = ".safetensors"
"""Files of this kind are LFS files, as on the hub."""


class HubServer:
    """Serves one repository, under the branch `main` and as a commit."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.requests: list[str] = []
        self.sent_bytes = 0
        self.cut_after: int | None = None
        """Bytes of a large file after which the connection breaks, once."""
        self.broken = ""
        """A file whose content is answered with an error."""
        self.url = ""

    def tree(self) -> list[dict[str, Any]]:
        return [self._entry(name, content) for name, content in sorted(self.files.items())]

    def _entry(self, name: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "type": "file",
            "path": name,
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
        }
        if name.endswith(LARGE):
            sha = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 134}
        return entry


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: HubServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> HubServer:
        assert isinstance(self.server, _Server)
        return self.server.hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {path}")
        api = f"/api/models/{hub.name}"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in hub.files]
            self._json({"id": hub.name, "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"{api}/tree/"):
            self._json(hub.tree())
        elif path.startswith(f"/{hub.name}/resolve/"):
            self._file(path.rpartition("/")[2])
        else:
            missing = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Not found"}
            self._send(404, b"", missing)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str) -> None:
        hub = self.hub
        content = hub.files.get(name)
        if content is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif self.command == "GET" and name == hub.broken:
            self._send(500, b"", {})
        else:
            self._content(content, large=name.endswith(LARGE))

    def _content(self, content: bytes, *, large: bool) -> None:
        """Send a file, or the part of it that is wanted; a large one may be cut."""
        hub, whole, status = self.hub, len(content), 200
        digest = hashlib.sha256 if large else hashlib.sha1
        headers = {
            "ETag": f'"{digest(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if (wanted := self.headers.get("Range")) is not None:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            content = content[start:]
            headers["Content-Range"] = f"bytes {start}-{whole - 1}/{whole}"
            status = 206
        if large and self.command == "GET":
            cut, hub.cut_after = hub.cut_after, None
            self._send(status, content, headers, cut=cut)
            hub.sent_bytes += len(content[:cut])
        else:
            self._send(status, content, headers)

    def _send(
        self, status: int, content: bytes, headers: dict[str, str], cut: int | None = None
    ) -> None:
        """Answer; the connection breaks after `cut` bytes."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:cut])
            self.close_connection = self.close_connection or len(content[:cut]) < len(content)


@contextmanager
def serving_hub(name: str, folder: Path) -> Iterator[HubServer]:
    """Serve the files of a folder as a model while the block lasts."""
    hub = HubServer(name, folder)
    server = _Server(hub)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
