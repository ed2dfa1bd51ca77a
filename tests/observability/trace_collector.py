"""A collector of OTLP, over gRPC and over HTTP, that keeps the spans it is sent."""

from __future__ import annotations

import gzip
import threading
import time
from concurrent import futures
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

LIMIT_S = 30.0


@dataclass(frozen=True)
class Seen:
    """One span as it was sent."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    failed: bool
    trace_state: str


class Collector:
    """Listens on two free ports while it is entered."""

    def __init__(self) -> None:
        self._spans: list[Seen] = []
        self._changed = threading.Condition()
        self._grpc = grpc.server(futures.ThreadPoolExecutor(2))
        handler = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=ExportTraceServiceRequest.FromString,
            response_serializer=ExportTraceServiceResponse.SerializeToString,
        )
        service = "opentelemetry.proto.collector.trace.v1.TraceService"
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": handler}),))
        self.grpc_endpoint = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http_endpoint = f"http://127.0.0.1:{self._http.server_address[1]}/v1/traces"

    def __enter__(self) -> Self:
        self._grpc.start()
        self._serving = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._serving.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.shutdown()
        self._serving.join()
        self._http.server_close()
        self._grpc.stop(None).wait()

    @property
    def spans(self) -> list[Seen]:
        """All so far."""
        with self._changed:
            return list(self._spans)

    def trace(self, trace_id: str, spans: int) -> dict[str, Seen]:
        """The spans of a trace by their names, once there are so many."""
        limit = time.monotonic() + LIMIT_S
        with self._changed:
            while len(found := [span for span in self._spans if span.trace_id == trace_id]) < spans:
                assert self._changed.wait(limit - time.monotonic()), found
        return {span.name: span for span in found}

    def _export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        self._take(request)
        return ExportTraceServiceResponse()

    def _take(self, request: ExportTraceServiceRequest) -> None:
        with self._changed:
            for group in request.resource_spans:
                resource = _values(group.resource.attributes)
                for scope in group.scope_spans:
                    self._spans += [_seen(span, resource) for span in scope.spans]
            self._changed.notify_all()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                collector._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def _seen(span: Any, resource: dict[str, Any]) -> Seen:
    return Seen(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        resource=resource,
        failed=span.status.code == 2,
        trace_state=span.trace_state,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
