"""The methods of the multiplexer as data, read from its service descriptor.

An RPC added to the proto appears here by itself; nothing else names the methods one by one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from google.protobuf.descriptor import MethodDescriptor

from teimgr.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.frames import Flag, Method

SERVICE = multiplexer_pb2.DESCRIPTOR.services_by_name["TeiMultiplexer"]
ARROW_FIELD = multiplexer_pb2.EmbedArrowRequest.DESCRIPTOR.fields_by_name["arrow_ipc"].number


class Shape(Enum):
    """Who streams."""

    UNARY = "unary"
    BIDI = "bidi"
    CLIENT_STREAM = "client stream"


class Payload(Enum):
    """What of a message the worker gets."""

    INNER = "the bytes of its field `request`"
    WHOLE = "the message as it is"
    NOTHING = "an empty payload"


@dataclass(frozen=True, slots=True)
class Rpc:
    """One method.

    Attributes:
        name: As in the proto, e.g. `EmbedSparseStream`.
        path: The HTTP/2 path.
        shape: Who streams.
        method: What the worker is asked; None where no frame exists for it.
        payload: What of a message the worker gets.
        inner_field: Number of the field `request`; 0 where the message has none.
        missing: The refusal of a message without inner request.
        lane: `Flag.BULK` for whole batches in one message, else none; batches also wait for room in the worker.
        limited: Whether the configured request timeout applies: to single calls, not to batches and streams.
        tells_compute: Whether the answer's initial metadata says what it cost.
    """

    name: str
    path: str
    shape: Shape
    method: Method | None
    payload: Payload
    inner_field: int
    missing: str
    lane: Flag
    limited: bool
    tells_compute: bool


def _rpc(descriptor: MethodDescriptor) -> Rpc:
    subject = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", descriptor.name.removesuffix("Stream")).lower()
    shape = _shape(descriptor)
    payload = _payload(descriptor)
    inner = descriptor.input_type.fields_by_name.get("request")
    whole = payload is Payload.WHOLE
    return Rpc(
        name=descriptor.name,
        path=f"/{SERVICE.full_name}/{descriptor.name}",
        shape=shape,
        method=None if shape is Shape.CLIENT_STREAM else Method.__members__.get(subject.upper()),
        payload=payload,
        inner_field=inner.number if inner else 0,
        missing=f"Missing {subject} request",
        lane=Flag.BULK | Flag.WAIT if whole else Flag.NONE,
        limited=shape is Shape.UNARY and not whole,
        tells_compute=not descriptor.server_streaming and "metadata" in descriptor.output_type.fields_by_name,
    )


def _shape(descriptor: MethodDescriptor) -> Shape:
    if not descriptor.client_streaming:
        return Shape.UNARY
    return Shape.BIDI if descriptor.server_streaming else Shape.CLIENT_STREAM


def _payload(descriptor: MethodDescriptor) -> Payload:
    fields = descriptor.input_type.fields_by_name
    if "request" in fields:
        return Payload.INNER
    return Payload.WHOLE if "arrow_ipc" in fields else Payload.NOTHING


RPCS: tuple[Rpc, ...] = tuple(_rpc(method) for method in SERVICE.methods)
BY_PATH: dict[str, Rpc] = {rpc.path: rpc for rpc in RPCS}
