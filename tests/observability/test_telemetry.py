"""One trace from a client's context to the forward, as a real collector receives it; request ids in every log."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest
from tests.observability.trace_collector import Collector, Seen
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess
from tests.support.models import build

from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2

pytestmark = pytest.mark.slow

SERVICE = "tei_multiplexer.v1.TeiMultiplexer"
PARENT = "00f067aa0ba902b7"
# What a worker's spans hang below.
BELOW = {"worker": None, "tokenize": "worker", "queue": "worker", "batch": "worker", "forward": "batch"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("bert", tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def daemon(tiny: Path, collector: Collector) -> Iterator[DaemonProcess]:
    """A daemon that exports over gRPC and logs at every level."""
    otel = {"endpoint": collector.grpc_endpoint, "service_name": "search", "deployment_environment": "test"}
    process = WarmDaemonProcess(otel=otel, log_level="debug,grpc=info,asyncio=info")
    process.start({"OTEL_BSP_SCHEDULE_DELAY": "100"})
    try:
        with process.client() as client:
            client.create("a", str(tiny), dtype="float32")
            client.wait_until_running("a", deadline_s=100)
        yield process
    finally:
        process.close()


@pytest.fixture
def channel(daemon: DaemonProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{daemon.grpc_port}") as channel:
        yield channel


def call(channel: grpc.Channel, name: str, request: Any, reply: Any) -> Any:
    return channel.unary_unary(
        f"/{SERVICE}/{name}", request_serializer=type(request).SerializeToString, response_deserializer=reply.FromString
    )


def embed_request(text: str = "fog", instance: str = "a") -> multiplexer_pb2.EmbedRequest:
    target = multiplexer_pb2.Target(instance_name=instance)
    return multiplexer_pb2.EmbedRequest(target=target, request=tei_pb2.EmbedRequest(inputs=text))


def check_below(spans: dict[str, Seen], root: Seen) -> None:
    """The worker's spans lie in one another, in order, within the call."""
    for name, above in BELOW.items():
        parent = root if above is None else spans[above]
        assert spans[name].parent_id == parent.span_id, name
        assert parent.start_ns <= spans[name].start_ns <= spans[name].end_ns <= parent.end_ns + 1_000_000, name
    assert spans["tokenize"].end_ns <= spans["queue"].start_ns
    assert spans["queue"].end_ns <= spans["batch"].start_ns


@pytest.mark.clause("N-otel", "N-trace-context")
def test_a_unary_call_is_one_trace_below_the_clients_span(channel: grpc.Channel, collector: Collector) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    metadata = (("traceparent", f"00-{trace_id}-{PARENT}-01"), ("tracestate", "vendor=1"))
    request = embed_request()
    call(channel, "Embed", request, tei_pb2.EmbedResponse)(request, metadata=metadata, timeout=30)
    spans = collector.trace(trace_id, 6)
    root = spans[f"{SERVICE}/Embed"]
    assert (root.parent_id, root.trace_state, root.failed) == (PARENT, "vendor=1", False)
    check_below(spans, root)
    assert (
        root.attributes.items()
        >= {
            "rpc.system": "grpc",
            "rpc.service": SERVICE,
            "rpc.method": "Embed",
            "rpc.grpc.status_code": 0,
            "tei.instance": "a",
            "tei.rows": 1,
            "tei.rows_failed": 0,
            "tei.output_dtype": "f32",
        }.items()
    )
    assert spans["batch"].attributes["tei.tokens"] > 0
    named = {"service.name": "search", "deployment.environment.name": "test", "service.instance.id": "mux-0"}
    assert root.resource.items() >= named.items()


@pytest.mark.clause("N-trace-context")
def test_an_arrow_call_tells_of_failed_rows_and_its_dtype(channel: grpc.Channel, collector: Collector) -> None:
    trace_id = "aa" * 16
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"text": ["fine", None, "fine too"]})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    request = multiplexer_pb2.EmbedArrowRequest(
        target=multiplexer_pb2.Target(instance_name="a"), arrow_ipc=sink.getvalue().to_pybytes()
    )
    metadata = (("traceparent", f"00-{trace_id}-{PARENT}-01"),)
    call(channel, "EmbedArrow", request, multiplexer_pb2.EmbedArrowResponse)(request, metadata=metadata, timeout=30)
    spans = collector.trace(trace_id, 6)
    root = spans[f"{SERVICE}/EmbedArrow"]
    assert {key: root.attributes[key] for key in ("tei.rows", "tei.rows_failed")} == {
        "tei.rows": 3,
        "tei.rows_failed": 1,
    }
    check_below(spans, root)


def test_a_stream_has_spans_for_its_messages(channel: grpc.Channel, collector: Collector) -> None:
    trace_id = "bb" * 16
    stream = channel.stream_stream(
        f"/{SERVICE}/EmbedStream",
        request_serializer=multiplexer_pb2.EmbedRequest.SerializeToString,
        response_deserializer=tei_pb2.EmbedResponse.FromString,
    )
    metadata = (("traceparent", f"00-{trace_id}-{PARENT}-01"),)
    answers = list(stream(iter([embed_request(f"text {n}") for n in range(40)]), metadata=metadata, timeout=60))
    assert len(answers) == 40
    spans = collector.trace(trace_id, 1 + 32 * 5)
    assert spans[f"{SERVICE}/EmbedStream"].attributes["tei.rows"] == 40


def test_a_failed_call_has_its_status(channel: grpc.Channel, collector: Collector) -> None:
    trace_id = "cc" * 16
    request = embed_request(instance="nobody")
    with pytest.raises(grpc.RpcError) as failure:
        call(channel, "Embed", request, tei_pb2.EmbedResponse)(
            request, metadata=(("traceparent", f"00-{trace_id}-{PARENT}-01"), ("x-request-id", "mine-7")), timeout=30
        )
    assert dict(failure.value.trailing_metadata())["x-request-id"] == "mine-7"
    (root,) = collector.trace(trace_id, 1).values()
    assert root.failed
    assert root.attributes["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]


def test_a_client_that_does_not_sample_leaves_no_spans(channel: grpc.Channel, collector: Collector) -> None:
    unsampled, after = "dd" * 16, "ee" * 16
    request = embed_request()
    for trace_id, flags in ((unsampled, "00"), (after, "01")):
        metadata = (("traceparent", f"00-{trace_id}-{PARENT}-{flags}"),)
        call(channel, "Embed", request, tei_pb2.EmbedResponse)(request, metadata=metadata, timeout=30)
    collector.trace(after, 6)
    assert [span for span in collector.spans if span.trace_id == unsampled] == []


@pytest.mark.parametrize("traceparent", ["", "00-xyz", f"00-{'0' * 32}-{PARENT}-01", f"ff-{'a' * 32}-{PARENT}-01"])
def test_a_malformed_context_begins_a_new_trace(channel: grpc.Channel, collector: Collector, traceparent: str) -> None:
    request = embed_request()
    before = {span.trace_id for span in collector.spans}
    _, answered = call(channel, "Embed", request, tei_pb2.EmbedResponse).with_call(
        request, metadata=(("traceparent", traceparent), ("x-request-id", "no context")), timeout=30
    )
    given = dict(answered.trailing_metadata())["x-request-id"]
    assert given != "no context"  # a blank does not fit into a header
    assert "-" in given
    new = next_trace(collector, before)
    spans = collector.trace(new, 6)
    assert spans[f"{SERVICE}/Embed"].parent_id == ""


def next_trace(collector: Collector, before: set[str]) -> str:
    """The id of a trace that began since."""
    with collector._changed:
        assert collector._changed.wait_for(lambda: {span.trace_id for span in collector._spans} - before, 30)
        return next(iter({span.trace_id for span in collector._spans} - before))


@pytest.mark.clause("N-trace-context")
def test_http_inference_is_one_trace_too(daemon: DaemonProcess, collector: Collector) -> None:
    trace_id = "ff" * 16
    request = urllib.request.Request(
        f"{daemon.api}/instances/a/embed",
        json.dumps({"inputs": ["one", "two"]}).encode(),
        {"content-type": "application/json", "traceparent": f"00-{trace_id}-{PARENT}-01", "x-request-id": "web-1"},
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        assert reply.headers["x-request-id"] == "web-1"
    spans = collector.trace(trace_id, 6)
    (root,) = [span for name, span in spans.items() if name.startswith("POST ")]
    assert (root.parent_id, root.resource["service.instance.id"]) == (PARENT, "daemon")
    assert root.attributes["tei.rows"] == 2
    check_below(spans, root)


@pytest.mark.clause("N-log-context")
def test_the_logs_of_mux_and_worker_name_request_and_trace(channel: grpc.Channel, daemon: DaemonProcess) -> None:
    trace_id = "12" * 16
    request = embed_request()
    metadata = (("traceparent", f"00-{trace_id}-{PARENT}-01"), ("x-request-id", "find-me"))
    _, answered = call(channel, "Embed", request, tei_pb2.EmbedResponse).with_call(
        request, metadata=metadata, timeout=30
    )
    assert dict(answered.trailing_metadata())["x-request-id"] == "find-me"
    lines = {name: events(daemon.folder / "logs" / f"{name}.log", "find-me") for name in ("_mux-0", "a")}
    (of_mux,), (of_worker,) = lines["_mux-0"], lines["a"]
    assert of_mux["trace_id"] == of_worker["trace_id"] == trace_id
    assert of_mux["span_id"] == of_worker["span_id"] != PARENT
    assert of_worker["instance"] == of_mux["instance"] == "a"
    assert of_worker["message"] == of_mux["message"] == "call answered"


def events(path: Path, request_id: str) -> list[dict[str, Any]]:
    """The events of a log with this request id."""
    found = [json.loads(line) for line in path.read_text().splitlines() if f'"{request_id}"' in line]
    return [event for event in found if event["request_id"] == request_id]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_over_http_the_same_spans_come(tiny: Path, collector: Collector) -> None:
    trace_id = "34" * 16
    process = WarmDaemonProcess(otel={"endpoint": collector.http_endpoint})
    process.start({"OTEL_BSP_SCHEDULE_DELAY": "100"})
    try:
        with process.client() as client:
            client.create("a", str(tiny), dtype="float32")
            client.wait_until_running("a", deadline_s=100)
        with grpc.insecure_channel(f"127.0.0.1:{process.grpc_port}") as channel:
            request = embed_request()
            metadata = (("traceparent", f"00-{trace_id}-{PARENT}-01"),)
            call(channel, "Embed", request, tei_pb2.EmbedResponse)(request, metadata=metadata, timeout=30)
        spans = collector.trace(trace_id, 6)
    finally:
        process.close()
    check_below(spans, spans[f"{SERVICE}/Embed"])
    assert spans["forward"].resource["service.name"] == "tei-manager"
