"""Table of all RPCs, read from the service descriptors: an RPC added to a proto appears here on its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from google.protobuf.descriptor import FileDescriptor, MethodDescriptor, ServiceDescriptor

from teimgr.errors import Unsupported
from teimgr.spec import Kind
from teimgr.wire.frames import Flag, Method
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2
from teimgr.wire.protobuf import TARGET_FIELD, Envelope, Octets, read_envelope

SERVICE = multiplexer_pb2.DESCRIPTOR.services_by_name["TeiMultiplexer"]
FILES: tuple[FileDescriptor, ...] = (tei_pb2.DESCRIPTOR, multiplexer_pb2.DESCRIPTOR, arrow_pb2.DESCRIPTOR)


class Shape(Enum):
    """Which side streams."""

    UNARY = "unary"
    BIDI = "bidi"
    CLIENT_STREAM = "client stream"


class PayloadSource(Enum):
    """Part of a message that the worker gets."""

    INNER = "the bytes of its field `request`"
    WHOLE = "the message as it is"
    NOTHING = "an empty payload"


@dataclass(frozen=True, slots=True)
class Rpc:
    """One RPC.

    Attributes:
        service: Full name of its service.
        name: As in the proto, e.g. `EmbedSparseStream`.
        path: The HTTP/2 path.
        shape: Which side streams.
        method: The worker's method; None if no frame exists for it.
        has_target: Whether its messages carry their target; else the call's metadata may.
        payload: Part of a message that the worker gets.
        inner_field: Number of the field `request`; 0 where the message has none.
        arrow_field: Number of the field with a whole Arrow batch; 0 where the message has none.
        missing: Error text for a message without inner request.
        lane: `Flag.BULK` for whole batches in one message, `Flag.WAIT` to wait for room in the worker.
        limited: Whether the configured request timeout applies: to single calls, not to batches and streams.
        reports_compute: Whether the initial metadata of the reply carries its compute cost.
        kinds: What an instance has to serve to get a call that names none, in order of preference; empty: anything.
    """

    service: str
    name: str
    path: str
    shape: Shape
    method: Method | None
    has_target: bool
    payload: PayloadSource
    inner_field: int
    arrow_field: int
    missing: str
    lane: int
    limited: bool
    reports_compute: bool
    kinds: tuple[str, ...]

    def worker_method(self) -> Method:
        """The method to request from the worker; raises Unsupported: no frame exists for this RPC."""
        if self.method is None:
            raise Unsupported(f"{self.name} is not served by this version of teimgr")
        return self.method

    def open(self, message: Octets) -> Envelope:
        """Split a message into its target and the worker's payload; each is None if missing.

        Raises:
            InvalidInput: the bytes are not a protobuf message.
        """
        if not self.has_target:
            return Envelope(None, message)
        envelope = read_envelope(message, self.inner_field, has_table=bool(self.arrow_field))
        if self.payload is PayloadSource.INNER:
            return envelope
        return Envelope(envelope.target, message if self.payload is PayloadSource.WHOLE else b"")


_CLASSIFYING = (Kind.CLASSIFIER.value, Kind.RERANKER.value)
_KINDS: dict[str, tuple[str, ...]] = {
    "embed": (Kind.EMBEDDING.value,),
    "embed_sparse": (Kind.SPARSE.value,),
    "embed_all": (Kind.EMBEDDING.value, Kind.MULTI_VECTOR.value),
    "predict": _CLASSIFYING,
    "predict_pair": _CLASSIFYING,
    "rerank": (Kind.RERANKER.value,),
}
_SHAPES = {(False, False): Shape.UNARY, (True, True): Shape.BIDI, (True, False): Shape.CLIENT_STREAM}


def _rpc(service: ServiceDescriptor, rpc: MethodDescriptor) -> Rpc:
    subject = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", rpc.name.removesuffix("Stream")).lower()
    fields = {field.name: field.number for field in rpc.input_type.fields}
    arrow_field = fields.get("arrow_ipc", 0)
    shape = _SHAPES[rpc.client_streaming, rpc.server_streaming]
    return Rpc(
        service=service.full_name,
        name=rpc.name,
        path=f"/{service.full_name}/{rpc.name}",
        shape=shape,
        method=Method.__members__.get(_frame_name(subject, shape, bool(arrow_field))),
        has_target=fields.get("target") == TARGET_FIELD,
        payload=_payload_source(set(fields)),
        inner_field=fields.get("request", 0),
        arrow_field=arrow_field,
        missing=f"Missing {subject} request",
        lane=_lane(subject, bool(arrow_field)),
        limited=shape is Shape.UNARY and not arrow_field,
        reports_compute=not rpc.server_streaming and "metadata" in rpc.output_type.fields_by_name,
        kinds=_KINDS.get(subject, ()),
    )


def _frame_name(subject: str, shape: Shape, is_arrow: bool) -> str:
    """Name of the frame's method: the subject, with a suffix unless each message is one text."""
    if shape is Shape.CLIENT_STREAM:
        return f"{subject}_stream".upper()
    return (f"{subject}_arrow" if is_arrow and not subject.endswith("arrow") else subject).upper()


def _payload_source(fields: set[str]) -> PayloadSource:
    if "request" in fields:
        return PayloadSource.INNER
    return PayloadSource.NOTHING if fields == {"target"} else PayloadSource.WHOLE


def _lane(subject: str, is_arrow: bool) -> int:
    if is_arrow:
        return Flag.BULK | Flag.WAIT
    return Flag.WAIT if subject == "rerank" else Flag.NONE


RPCS: tuple[Rpc, ...] = tuple(
    _rpc(service, method) for file in FILES for service in file.services_by_name.values() for method in service.methods
)
BY_PATH: dict[str, Rpc] = {rpc.path: rpc for rpc in RPCS}
SERVICES: tuple[str, ...] = tuple(dict.fromkeys(rpc.service for rpc in RPCS))
TEI_PACKAGE = tei_pb2.DESCRIPTOR.package
