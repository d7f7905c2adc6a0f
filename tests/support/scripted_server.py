"""An HTTP server that answers POST requests as a test tells it to, and names its models."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedServer:
    """Answers the n-th request with the n-th of its answers, and all later ones with the last."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        """Status and body of each."""
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models: list[str] = []
        """What `GET` of any path says it serves."""
        self.in_flight = self.most_in_flight = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                with outer._lock:
                    outer.in_flight += 1
                    outer.most_in_flight = max(outer.most_in_flight, outer.in_flight)
                    index = min(len(outer.bodies), len(outer.answers) - 1)
                    outer.bodies.append(json.loads(body) | {"path": self.path})
                    outer.keys.append(self.headers["authorization"])
                status, answer = outer.answers[index]
                raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                with outer._lock:
                    outer.in_flight -= 1
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def do_GET(self) -> None:
                raw = json.dumps({"data": [{"id": name} for name in outer.models]}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
