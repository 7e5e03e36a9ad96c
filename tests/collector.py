"""A collector of OpenTelemetry in a thread: it takes OTLP over HTTP and keeps what it gets."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class GotSpan:
    """A span as it came over the wire. Times are Unix time in ns."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    failed: bool
    attributes: dict[str, object]
    resource: dict[str, object]


@dataclass
class Collector:
    """What has come so far; `metrics` by name, the last export of each."""

    url: str = ""
    spans: list[GotSpan] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)
    raw: list[bytes] = field(default_factory=list)
    got_metrics: threading.Event = field(default_factory=threading.Event)

    def span(self, name: str) -> GotSpan:
        """The only span of that name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def tree(self, parent: str = "", depth: int = 0) -> Iterator[tuple[int, GotSpan]]:
        """Spans in the order they began, each after its parent, with its depth."""
        known = {span.span_id for span in self.spans}
        for span in sorted(self.spans, key=lambda each: each.start):
            if span.parent_id == parent or (not depth and span.parent_id not in known):
                yield depth, span
                yield from self.tree(span.span_id, depth + 1)

    def take(self, path: str, body: bytes) -> None:
        """Keeps one export."""
        self.raw.append(body)
        if path == "/v1/traces":
            for each in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = _plain(each.resource.attributes)
                self.spans += [_got(span, resource) for scope in each.scope_spans for span in scope.spans]
        elif path == "/v1/metrics":
            for each in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.metrics |= {m.name: m for scope in each.scope_metrics for m in scope.metrics}
            self.got_metrics.set()


def _plain(attributes) -> dict[str, object]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def _got(span: Span, resource: dict[str, object]) -> GotSpan:
    return GotSpan(
        span.name,
        Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == span.status.STATUS_CODE_ERROR,
        _plain(span.attributes),
        resource,
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(self.path, body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        collector.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
