"""OpenTelemetry traces: spans of calls, exported over OTLP if an endpoint is set; else W3C context passes through.

OpenTelemetry's packages (the extra `teimgr[otel]`) are imported only with an endpoint. Workers need none of them: a
worker's reply carries its `CallStats`, from which the mux or the daemon makes the worker's spans afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from teimgr import __version__
from teimgr.observability.request_context import (
    TRACEPARENT,
    TRACESTATE,
    Attributes,
    CallStats,
    RequestContext,
    Telemetry,
    Trace,
    request_id_of,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span, TracerProvider
    from opentelemetry.trace import Tracer

    from teimgr.config.settings import Settings

log = logging.getLogger(__name__)

_HTTP_PORT = 4318
_FLUSH_MS = 3000
# A stream may have a million messages: only the first ones get their own spans; row counts cover all.
_MAX_WORKER_SPANS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporting:
    """OTLP export of one process: endpoint and resource attributes; `instance` is `service.instance.id`.

    `endpoint` is OTLP over HTTP where it has a path, as `http://host:4318/v1/traces`, or the port 4318; else over gRPC.
    `sample_ratio` applies to traces that begin here; a client's trace context carries its own decision.
    """

    endpoint: str
    service_name: str
    sample_ratio: float
    deployment_environment: str
    instance: str


def exporting(settings: Settings, instance: str) -> Exporting | None:
    return Exporting(**asdict(settings.otel), instance=instance) if settings.otel.endpoint else None


def open_telemetry(exporting: Exporting | None) -> Telemetry:
    """Set up export; without `exporting`, or without OpenTelemetry's packages, spans are not made."""
    if exporting is None:
        return Telemetry()
    try:
        provider = _provider(exporting)
    except ImportError as error:
        log.error("traces are not exported: %s; install teimgr[otel]", error)
        return Telemetry()
    return ExportedTelemetry(provider.get_tracer("teimgr", __version__), provider)


class ExportedTelemetry(Telemetry):
    """Telemetry with spans: each call's context is a `TracedContext`, which `end` must end."""

    is_on = True

    def __init__(self, tracer: Tracer, provider: TracerProvider) -> None:
        self._tracer = tracer
        self._provider = provider

    def begin(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> RequestContext:
        return TracedContext(self._tracer, name, headers, attributes)

    def close(self) -> None:
        """Flush pending spans, for at most some seconds, and shut down. Blocks."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


class TracedContext(RequestContext):
    """A request context whose trace is our server span, a child of the client's span if its headers have one."""

    __slots__ = ("_rows", "_rows_failed", "_tracer", "_worker_spans", "span")

    def __init__(self, tracer: Tracer, name: str, headers: Mapping[str, str], attributes: Attributes) -> None:
        from opentelemetry.trace import SpanKind

        request_id = request_id_of(headers)
        self._tracer = tracer
        self.span: Any = tracer.start_span(
            name,
            context=_parent(headers),
            kind=SpanKind.SERVER,
            attributes={**attributes, "teimgr.request_id": request_id},
        )
        self._worker_spans = 0
        self._rows = 0
        self._rows_failed = 0
        at = self.span.get_span_context()
        super().__init__(
            request_id, Trace(at.trace_id.to_bytes(16, "big"), at.span_id.to_bytes(8, "big"), at.trace_flags.sampled)
        )

    def on_stats(self, packed: bytes, instance: str) -> None:
        stats = CallStats.unpack(packed)
        self._rows += stats.rows
        self._rows_failed += stats.rows_failed
        self.span.set_attributes({"tei.instance": instance, "tei.output_dtype": stats.output_dtype})
        if self._worker_spans < _MAX_WORKER_SPANS:
            self._worker_spans += 1
            _trace_worker(self._tracer, self.span, stats)

    def end(self, attributes: Attributes, error: str | None = None, name: str | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        if self._rows:
            self.span.set_attributes({"tei.rows": self._rows, "tei.rows_failed": self._rows_failed})
        self.span.set_attributes(attributes)
        if error is not None:
            self.span.set_status(Status(StatusCode.ERROR, error))
        if name is not None:
            self.span.update_name(name)
        self.span.end()


def _parent(headers: Mapping[str, str]) -> Any:
    """Return the client's span as an OpenTelemetry context; an empty one without valid headers."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

    given = Trace.parse(headers.get(TRACEPARENT, ""))
    if given is None:
        return Context()
    at = SpanContext(
        int.from_bytes(given.trace_id, "big"),
        int.from_bytes(given.span_id, "big"),
        is_remote=True,
        trace_flags=TraceFlags(int(given.sampled)),
        trace_state=TraceState.from_header([headers[TRACESTATE]]) if TRACESTATE in headers else None,
    )
    return set_span_in_context(NonRecordingSpan(at), Context())


def _trace_worker(tracer: Tracer, parent: Span, stats: CallStats) -> None:
    """The spans of one reply: worker > tokenize, queue, batch > forward.

    Durations are means over the rows, laid end to end from the request's arrival.
    """
    received_ns = stats.received_ns + time.time_ns() - time.monotonic_ns()
    queued_ns = received_ns + stats.tokenization_ns
    batch_ns = queued_ns + stats.queue_ns
    done_ns = received_ns + stats.total_ns
    rows = {"tei.rows": stats.rows, "tei.rows_failed": stats.rows_failed}
    worker = _span(tracer, parent, "worker", received_ns, rows)
    _span(tracer, worker, "tokenize", received_ns, {"tei.chars": stats.chars}).end(queued_ns)
    _span(tracer, worker, "queue", queued_ns, {}).end(batch_ns)
    batch = _span(tracer, worker, "batch", batch_ns, {"tei.tokens": stats.tokens})
    _span(tracer, batch, "forward", batch_ns, {}).end(batch_ns + stats.inference_ns)
    batch.end(max(done_ns, batch_ns + stats.inference_ns))
    worker.end(max(done_ns, batch_ns + stats.inference_ns))


def _span(tracer: Tracer, parent: Any, name: str, start_ns: int, attributes: Attributes) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    return tracer.start_span(
        name, context=set_span_in_context(parent, Context()), attributes=dict(attributes), start_time=start_ns
    )


def _provider(exporting: Exporting) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    resource = {
        "service.name": exporting.service_name,
        "service.version": __version__,
        "service.instance.id": exporting.instance,
    }
    if exporting.deployment_environment:
        resource["deployment.environment.name"] = exporting.deployment_environment
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(exporting.sample_ratio)),
        resource=Resource.create(resource),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(_exporter(exporting)))
    return provider


def _exporter(exporting: Exporting) -> Any:
    endpoint = exporting.endpoint
    parts = urlsplit(endpoint)
    has_path = parts.path.strip("/") != ""
    if has_path or parts.port == _HTTP_PORT:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter(endpoint=endpoint if has_path else f"{endpoint.rstrip('/')}/v1/traces")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return GrpcExporter(endpoint=endpoint, insecure=parts.scheme != "https")
