"""Malformed protobuf and Arrow over gRPC: hypothesis writes messages, breaks their bytes, and sends them as they are.

hypothesis and not atheris: what is fuzzed are other processes, so there is no coverage here that could guide anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pyarrow as pa
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from teimgr.wire.grpc_core.rpc import SERVICE
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2
from tests.fuzz.bytes_of import arrow_bodies, broken, messages, names
from tests.fuzz.target import FLEET, SEED, Target

ANSWER_LIMIT_S = 30.0
TEI_SERVICES = tuple(tei_pb2.DESCRIPTOR.services_by_name.values())
ARROW_SERVICES = tuple(arrow_pb2.DESCRIPTOR.services_by_name.values())

# Every instance runs, so that nothing is UNAVAILABLE; no model here gives a NaN, so that nothing is INTERNAL.
ALLOWED = frozenset(
    (
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
)


@dataclass(frozen=True)
class Call:
    """What is sent: one raw message to a method that takes one, any number to one that streams."""

    service: str
    method: str
    sends_many: bool
    answers_many: bool
    raw: Sequence[bytes]
    instance: str | None = None  # in the metadata


@dataclass
class Report:
    """How many calls ended how."""

    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def cases(self) -> int:
        return sum(self.statuses.values())


def run(target: Target, cases: int) -> Report:
    """`cases` calls, shared between the mux, tei.v1 on both ports, and Arrow; then the target must be unharmed.

    Raises:
        AssertionError: an answer that bad input must not have, with the smallest call that has it; or harm.
    """
    report = Report()
    with _channels(target) as channels:
        mux = channels["mux"]
        for share, strategy, channel in (
            (0.3, calls(SERVICE), mux),
            (0.1, calls(*TEI_SERVICES, *ARROW_SERVICES, named=True), mux),
            (0.2, arrow_calls(), mux),
            *((0.4 / len(FLEET), calls(*TEI_SERVICES), channels[name]) for name in FLEET),
        ):
            _attempt(strategy, channel, max(1, round(cases * share)), report)
            target.check_unharmed()
    return report


def _attempt(strategy: st.SearchStrategy[Call], channel: grpc.Channel, cases: int, report: Report) -> None:
    @seed(SEED)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def attempt(call: Call) -> None:
        code, details = _send(channel, call)
        report.statuses[code.name] += 1
        assert code in ALLOWED, (code.name, details)

    attempt()


def _send(channel: grpc.Channel, call: Call) -> tuple[grpc.StatusCode, str]:
    """The status of a call; an answer that is no message of its type raises."""
    shape = f"{'stream' if call.sends_many else 'unary'}_{'stream' if call.answers_many else 'unary'}"
    answer = _ANSWERS[call.service, call.method]
    ask = getattr(channel, shape)(f"/{call.service}/{call.method}", response_deserializer=answer.FromString)
    metadata = [("x-teimgr-instance", call.instance)] if call.instance else None
    try:
        sent = iter(call.raw) if call.sends_many else call.raw[0]
        got = ask(sent, timeout=ANSWER_LIMIT_S, metadata=metadata)
        for message in got if call.answers_many else [got]:
            _check(message)
    except grpc.RpcError as error:
        return error.code(), str(error.details())
    return grpc.StatusCode.OK, ""


def _check(message: Any) -> None:
    """Arrow in an answer can be read."""
    if "arrow_ipc" in message.DESCRIPTOR.fields_by_name:
        pa.ipc.open_stream(message.arrow_ipc).read_all().validate(full=True)


@st.composite
def calls(draw: st.DrawFn, *services: ServiceDescriptor, named: bool = False) -> Call:
    """A call of any method of `services`; `named` puts an instance into the metadata."""
    service = draw(st.sampled_from(services))
    method = draw(st.sampled_from(list(service.methods)))
    raw = messages(method.input_type).flatmap(lambda message: broken(message.SerializeToString()))
    many = method.client_streaming
    sent = draw(st.lists(raw, max_size=4)) if many else [draw(raw)]
    instance = draw(names()) if named else None
    return Call(service.full_name, method.name, many, method.server_streaming, sent, instance)


@st.composite
def arrow_calls(draw: st.DrawFn) -> Call:
    """A call with Arrow in it: the envelope is whole, the table is odd or broken."""
    method = SERVICE.methods_by_name[draw(st.sampled_from([m.name for m in SERVICE.methods if "Arrow" in m.name]))]
    kind = GetMessageClass(method.input_type)

    def envelope(body: bytes) -> bytes:
        message = kind(arrow_ipc=body, truncate=draw(st.booleans()), noop=draw(st.booleans()))
        message.target.instance_name = draw(names())
        return bytes(message.SerializeToString())

    many = method.client_streaming
    bodies = draw(st.lists(arrow_bodies(), min_size=1, max_size=3 if many else 1))
    return Call(SERVICE.full_name, method.name, many, method.server_streaming, [envelope(body) for body in bodies])


@contextmanager
def _channels(target: Target) -> Iterator[dict[str, grpc.Channel]]:
    ports = {"mux": target.daemon.grpc_port, **target.ports}
    opened = {name: grpc.insecure_channel(f"127.0.0.1:{port}") for name, port in ports.items()}
    try:
        yield opened
    finally:
        for channel in opened.values():
            channel.close()


_ANSWERS = {
    (service.full_name, method.name): GetMessageClass(method.output_type)
    for service in (SERVICE, *TEI_SERVICES, *ARROW_SERVICES)
    for method in service.methods
}
