"""An OpenTelemetry collector for tests: takes OTLP over HTTP, and keeps the spans."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class ReceivedSpan:
    """One span, as it came over the wire."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    """"" of the first span of a trace."""
    seconds: float
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Receiver:
    """Where to send spans, and those that came."""

    url: str
    spans: list[ReceivedSpan] = field(default_factory=list)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in pairs}


def _read(body: bytes) -> Iterator[ReceivedSpan]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = str(_attributes(resource.resource.attributes)["service.name"])
        for scope in resource.scope_spans:
            for one in scope.spans:
                yield ReceivedSpan(
                    name=one.name,
                    service=service,
                    trace_id=one.trace_id.hex(),
                    span_id=one.span_id.hex(),
                    parent_id=one.parent_span_id.hex(),
                    seconds=(one.end_time_unix_nano - one.start_time_unix_nano) / 1e9,
                    attributes=_attributes(one.attributes),
                )


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a collector while the block lasts."""
    receiver = Receiver("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            receiver.spans.extend(_read(body))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Stay quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
