"""RPCs: the table of all, read from the service descriptors, and one call on its HTTP/2 stream, metadata to status.

A new RPC in a proto needs no code here.
Protocol: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from google.protobuf.descriptor import FileDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError

from teimgr.errors import Cancelled, DeadlineExceeded, InvalidInput, TeimgrError, TooLarge, Unavailable, Unsupported
from teimgr.http.byte_budget import ByteBudget, Charge
from teimgr.http.http2.headers import Headers
from teimgr.http.http2.stream import Stalled, Stream
from teimgr.spec import Kind
from teimgr.wire.frames import MAX_DEADLINE_MS, Flag, Method
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2
from teimgr.wire.protobuf import TARGET_FIELD, Envelope, Octets, Slice, read_envelope
from teimgr.wire.status import GrpcStatus

SERVICE = multiplexer_pb2.DESCRIPTOR.services_by_name["TeiMultiplexer"]
FILES: tuple[FileDescriptor, ...] = (tei_pb2.DESCRIPTOR, multiplexer_pb2.DESCRIPTOR, arrow_pb2.DESCRIPTOR)


class Shape(Enum):
    """Which side streams."""

    UNARY = "unary"
    BIDI = "bidi"
    CLIENT_STREAM = "client stream"


class PayloadSource(Enum):
    """The part of a message that is sent to the worker."""

    INNER = "the bytes of its field `request`"
    WHOLE = "the whole message"
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
        payload: The part of a message that is sent to the worker.
        inner_field: Number of the field `request`; 0 if the message lacks it.
        arrow_field: Number of the field with a whole Arrow batch; 0 if the message lacks it.
        missing: Error text for a message without inner request.
        lane: `Flag.BULK` for whole batches in one message, `Flag.WAIT` to wait for room in the worker.
        limited: Whether the configured request timeout applies: to single calls, not to batches and streams.
        reports_compute: Whether the initial metadata of the reply has its compute cost.
        kinds: Kinds of instance that may get a call without a target, in order of preference; empty means any.
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
        """Return the method to request from the worker; raises Unsupported if no frame exists for this RPC."""
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
    """Return the name of the frame's method: the subject, with a suffix unless each message is one text."""
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


_HEAD: Headers = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_TEXT_TYPE = (b"content-type", b"text/plain; charset=utf-8")
_REFUSALS = {
    405: b"This port serves gRPC, whose calls are POST.",
    415: b"This port serves gRPC in protobuf: content-type application/grpc or application/grpc+proto.",
}
_CONTENT_TYPE = re.compile(r"application/grpc(\+proto)?(;.*)?")
_CUT_OFF = "Malformed message: the stream ends inside it"
_PREFIX_BYTES = 5  # compressed flag and length of a message
# Limits on the time to receive a message, from its first byte on, and on its wait for the budget.
MESSAGE_S = 120.0
BUDGET_WAIT_S = 30.0
# Limit on the wait for more of the budget. Shorter, because the partial message holds bytes that others wait for.
_GROWTH_WAIT_S = 5.0
# Whole messages up to this size do not wait for the budget: they are handed on at once, which frees their memory.
_FREE_BYTES = 64 * 1024
# Longer messages are sent after their prefix, without a copy.
_COPIED_BYTES = 16 * 1024
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
# Of a status message as it is sent; clients bound all trailers together at 8 KiB.
_MAX_STATUS_BYTES = 4096
# Characters of a status message that are sent unchanged; others are percent-encoded UTF-8.
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_CUT_ESCAPE = re.compile(r"%.?\Z")


class RpcStatusError(Exception):
    """Ends the call with a gRPC status that is not one of our error codes."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.status = GrpcStatus(number, message)


def is_rpc(headers: Mapping[bytes, bytes]) -> bool:
    """True if a Content-Type header names gRPC, in any encoding."""
    return headers.get(b"content-type", b"").startswith(b"application/grpc")


class RpcStream:
    """One RPC on the HTTP/2 stream `stream`. A reset by the client cancels the task that serves it.

    `budget` bounds the bytes of messages that are received and not handed on. `max_reply_bytes` defaults to
    `max_message_bytes`. An RPC that `keeps_messages` until the last has arrived does not wait for the budget, because
    others would wait for the bytes that it holds.
    """

    def __init__(
        self,
        stream: Stream,
        max_message_bytes: int,
        budget: ByteBudget,
        max_reply_bytes: int | None = None,
        *,
        keeps_messages: bool = False,
    ) -> None:
        # The last of several headers with the same name applies.
        self.metadata = {name.decode("latin-1"): value.decode("latin-1") for name, value in stream.headers}
        self.path = stream.head.target.decode("ascii")
        self.stream = stream
        self._buffer = stream.received
        self._max_message_bytes = max_message_bytes
        self._max_reply_bytes = max_reply_bytes or max_message_bytes
        self._starting: asyncio.Timeout | None = None  # set while a message is awaited
        self._leaving_pause_s: float | None = None
        self._opened = self._is_refused_encoding = False
        self._keeps_messages = keeps_messages
        self.charge = Charge(budget)  # for messages received and not handed on

    @property
    def http_refusal(self) -> int:
        """The HTTP status for a request that is not gRPC; 0 for gRPC."""
        if self.metadata.get(":method") != "POST":
            return 405
        return 0 if _CONTENT_TYPE.fullmatch(self.metadata.get("content-type", "")) else 415

    def charge_to(self, budget: ByteBudget) -> None:
        """Charge the messages to another budget, before the first of them."""
        self.charge = Charge(budget)

    def timeout_s(self) -> float | None:
        """Return the client's timeout, at most that of a frame, None for no bound; raises InvalidInput for a malformed
        header."""
        text = self.metadata.get("grpc-timeout")
        if text is None:
            return None
        match = _TIMEOUT.fullmatch(text)
        if match is None:
            raise InvalidInput("Malformed grpc-timeout")
        return min(int(match[1]) * _UNIT_S[match[2]], MAX_DEADLINE_MS / 1000)

    async def receive(self, starts_within_s: float | None = None) -> Octets | None:
        """Return the client's next message, None after the last. Its bytes are charged to `charge` as they arrive.

        Raises:
            TooLarge: it exceeds the message limit; its body is not read.
            Unsupported: it is compressed.
            Overloaded: too many bytes of other messages are being received, or of replies not read.
            DeadlineExceeded: it did not start, or did not end, in time.
            Unavailable: it did not start in the time of `leave`.
            InvalidInput: it is malformed, or the stream ended inside it.
        """
        if (message := self.received()) is not None:
            return message
        limit_s = starts_within_s if self._leaving_pause_s is None else self._leaving_pause_s
        try:
            async with asyncio.timeout(limit_s) as self._starting:
                prefix = await self._buffer.read(_PREFIX_BYTES)
            self._starting = None
            if not prefix:
                return None
            if len(prefix) < _PREFIX_BYTES:
                raise InvalidInput(_CUT_OFF)
            limit_s = MESSAGE_S
            async with asyncio.timeout(limit_s):
                return await self._body(prefix)
        except TimeoutError:
            if self._starting is not None and self._leaving_pause_s is not None:
                raise Unavailable("The server is stopping") from None
            raise DeadlineExceeded(f"Request timeout: no whole message within {limit_s:g} s") from None
        finally:
            self._starting = None

    def received(self) -> Octets | None:
        """Return the next message if it is received as a whole and within all bounds: no timer is needed."""
        prefix = self._buffer.peek(_PREFIX_BYTES)
        if len(prefix) < _PREFIX_BYTES or prefix[0]:
            return None
        size = int.from_bytes(prefix[1:], "big")
        is_whole = len(self._buffer) >= _PREFIX_BYTES + size
        if size > self._max_message_bytes or not is_whole:
            return None
        if size <= _FREE_BYTES and not self._keeps_messages:
            self.charge.add(size)
        elif not self.charge.try_take(size):
            return None
        self._buffer.take(_PREFIX_BYTES)
        return self._buffer.take(size)

    async def _body(self, prefix: Octets) -> Octets:
        if prefix[0] > 1:
            raise InvalidInput(f"Malformed message: its first byte is {prefix[0]}")
        if prefix[0]:
            encoding = self.metadata.get("grpc-encoding", "unknown")
            self._is_refused_encoding = True
            raise Unsupported(f"Content is compressed with `{encoding}` which isn't supported")
        size = int.from_bytes(prefix[1:], "big")
        if size > self._max_message_bytes:
            raise TooLarge(f"Request message larger than max ({size} vs. {self._max_message_bytes} bytes)")
        charged = 0
        while True:
            arrived = min(len(self._buffer), size)
            if arrived > charged:
                await self.charge.take(arrived - charged, self._budget_wait_s(charged))
                charged = arrived
            if arrived == size:
                return self._buffer.take(size)
            if self._buffer.has_ended:
                raise InvalidInput(_CUT_OFF)
            await self._buffer.more()

    def _budget_wait_s(self, charged: int) -> float:
        if self._keeps_messages:
            return 0.0
        return _GROWTH_WAIT_S if charged else BUDGET_WAIT_S

    def parse(self, kind: Any, raw: Octets) -> Any:
        """Parse a received message as `kind`, a generated class; it is no longer charged.

        Raises:
            InvalidInput: it is malformed.
        """
        self.charge.release()
        try:
            return kind.FromString(raw)
        except DecodeError as error:
            raise InvalidInput(f"Malformed {kind.DESCRIPTOR.full_name}: {error}") from error

    def leave(self, pause_s: float) -> None:
        """Prepare for the server's stop: limit the client's pauses between messages to `pause_s`, the present one from
        now on."""
        self._leaving_pause_s = pause_s
        if self._starting is not None:
            self._starting.reschedule(asyncio.get_running_loop().time() + pause_s)

    async def open(self, metadata: Mapping[str, str] | None = None, marks: Headers = ()) -> None:
        """Send the initial metadata, `marks` unchanged; `send` does it if this was not called."""
        await self.stream.send_headers([*_HEAD, *_encoded(metadata), *marks] if metadata else [*_HEAD, *marks])
        self._opened = True  # after the wait: if the deadline passes during it, the call ends by trailers alone

    async def send(self, message: Slice) -> None:
        """Send one message, waiting for the client's flow control; raises TooLarge if it exceeds the message limit."""
        if len(message) > self._max_reply_bytes:
            raise TooLarge(f"Reply message larger than max ({len(message)} vs. {self._max_reply_bytes} bytes)")
        if not self._opened:
            await self.open()
        prefix = b"\0" + len(message).to_bytes(4, "big")
        try:
            if len(message) > _COPIED_BYTES:
                await self.stream.send_data(prefix)
                await self.stream.send_data(message)
            else:
                await self.stream.send_data(b"".join((prefix, message)))
        except Stalled as error:
            raise Cancelled(f"The reply was not read: {error}") from None

    async def finish(self, status: GrpcStatus, metadata: Mapping[str, str] | None = None) -> None:
        """End the RPC; the trailers have `metadata` in addition to the status's own."""
        trailers = [(b"grpc-status", b"%d" % status.number)]
        if status.message:
            trailers.append((b"grpc-message", _encoded_message(status.message)))
        if self._is_refused_encoding:
            trailers.append((b"grpc-accept-encoding", b"identity"))
        if status.metadata or metadata:
            trailers += _encoded(dict(status.metadata) | dict(metadata or {}))
        await self.stream.send_headers([*(() if self._opened else _HEAD), *trailers], end=True)

    async def refuse(self, http_status: int) -> None:
        """Answer a request that is not gRPC."""
        text = _REFUSALS[http_status]
        fields = [(b":status", b"%d" % http_status), _TEXT_TYPE, (b"content-length", b"%d" % len(text))]
        await self.stream.send_headers(fields)
        await self.stream.send_data(text, end=True)

    def stop(self, error: TeimgrError) -> None:
        """Let reads fail once the received messages are read."""
        self._buffer.fail(error)


def _encoded(metadata: Mapping[str, str]) -> Headers:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in metadata.items()]


def _encoded_message(message: str) -> bytes:
    """Encode a status message for its header, cut if it is too long."""
    encoded = quote(message, safe=_PLAIN)
    if len(encoded) > _MAX_STATUS_BYTES:
        cut = _CUT_ESCAPE.sub("", encoded[:_MAX_STATUS_BYTES])
        encoded = quote(unquote_to_bytes(cut).decode(errors="ignore"), safe=_PLAIN)
    return encoded.encode("ascii")
