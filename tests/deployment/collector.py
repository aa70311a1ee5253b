"""A collector of traces on the loopback address, which keeps the spans that it gets."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """A span, with the service that sent it. Ids are hexadecimal, times nanoseconds."""

    service: str
    name: str
    trace_id: str
    id: str
    parent: str
    start: int
    end: int
    is_error: bool
    attributes: dict[str, Any]


class Collector:
    """Takes OTLP over HTTP until it is closed."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def trace_of(self, generation_id: str) -> list[Span]:
        """The spans of the trace that this generation belongs to."""
        ids = {s.trace_id for s in self.spans if s.attributes.get("generation_id") == generation_id}
        return [span for span in self.spans if span.trace_id in ids]

    def close(self) -> None:
        """Take no more."""
        self._server.shutdown()
        self._server.server_close()


def _spans(request: Any) -> list[Span]:
    return [
        Span(
            service=_attributes(resource.resource.attributes)["service.name"],
            name=span.name,
            trace_id=span.trace_id.hex(),
            id=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            start=span.start_time_unix_nano,
            end=span.end_time_unix_nano,
            is_error=span.status.code == 2,
            attributes=_attributes(span.attributes),
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
