"""Frame format of the links between processes: header, methods, timings, errors.

A frame is a fixed little-endian header of 24 bytes, a context, and a payload that is opaque to this layer:

    offset  size  field
    0       4     length       bytes of context and payload
    4       1     type         `FrameType`
    5       1     method       `Method`
    6       2     flags        `Flag`
    8       8     id           chosen by the requester, echoed by every answer
    16      4     deadline_ms  remaining time of a request, 0 = none
    20      4     context      bytes of context before the payload, 0 = none

A requester sends REQUEST and may send CANCEL with the same id; the worker answers a request with exactly one
REPLY or ERROR, except WATCH, which is answered by a REPLY per event until the link closes. The payload of an ERROR
is one byte `Code` and a UTF-8 message. The context of a REQUEST is a packed `RequestContext`, that of a REPLY a
packed `CallStats` if its trace is sampled (`observability/request_context.py`).

A payload of `Method.HTTP`, of a request and of a response, is a head, which is a little-endian length of 4 bytes and
that many bytes of a JSON object, and the raw body:

    request   {"dialect", "method", "path", "query", "headers"}   path and query are decoded, without the instance
    response  {"status", "headers"}

Names of headers are lower case.
"""

from __future__ import annotations

import asyncio
import ctypes
import re
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple, cast

import orjson

from teimgr.errors import InvalidInput, TeimgrError, error_from_code
from teimgr.spec import LANE_KEY, LANES

HEADER = struct.Struct("<IBBHQII")
# 49.7 days; a longer deadline is shortened to it.
MAX_DEADLINE_MS = 0xFFFF_FFFF
TIMINGS = struct.Struct("<IIQQQQ")
_HTTP_HEAD = struct.Struct("<I")
MAX_HEAD_BYTES = 64 * 1024

_NS_PER_MS = 1_000_000

Buffer = bytes | bytearray | memoryview
Payload = Buffer
# A received payload. Large ones are buffers, because `bytes` would take a copy, a millisecond per MB.
Received = Buffer


class FrameType(IntEnum):
    """Requesters send REQUEST and CANCEL, workers REPLY and ERROR; both send TENANT, between hosts only."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    CANCEL = 4
    TENANT = 5  # quotas and use of keys: `wire/tenants/remote.py`


class Method(IntEnum):
    """Method of a request. The comments give request payload → reply payload."""

    INFO = 1  # empty → tei.v1.InfoResponse
    EMBED = 2  # tei.v1.EmbedRequest → tei.v1.EmbedResponse
    EMBED_SPARSE = 3  # tei.v1.EmbedSparseRequest → tei.v1.EmbedSparseResponse
    EMBED_ALL = 4  # tei.v1.EmbedAllRequest → tei.v1.EmbedAllResponse
    PREDICT = 5  # tei.v1.PredictRequest → tei.v1.PredictResponse
    PREDICT_PAIR = 6  # tei.v1.PredictPairRequest → tei.v1.PredictResponse
    RERANK = 7  # tei.v1.RerankRequest → tei.v1.RerankResponse
    TOKENIZE = 8  # tei.v1.EncodeRequest → tei.v1.EncodeResponse
    DECODE = 9  # tei.v1.DecodeRequest → tei.v1.DecodeResponse
    EMBED_ARROW = 10  # tei_multiplexer.v1.EmbedArrowRequest → EmbedArrowResponse
    EMBED_SPARSE_ARROW = 11  # tei_multiplexer.v1.EmbedSparseArrowRequest → EmbedSparseArrowResponse
    RERANK_STREAM = 12  # teimgr.v1.RerankPairs → tei.v1.RerankResponse
    INFER_ARROW = 13  # teimgr.v1.ArrowRequest → teimgr.v1.ArrowResponse
    HTTP = 14  # `HttpRequest` → `HttpReply`
    WATCH = 64  # empty → one JSON object per event, its "state": loading, downloading, ready, draining or failed
    # empty → empty, after a self-test with a known text on the device
    # JSON {"batches": n or null} → {"batches": m}, without a self-test if more than n batches were run
    PROBE = 65
    STATS = 66  # empty → JSON object of counters; `CALLS_AND_MEMORY` → the cheap ones
    THREADS = 67  # JSON {"threads": n, "most": m} → empty; m applies while other workers are idle
    DRAIN = 68  # JSON {"grace_s": x, "handover": bool} → empty; the worker finishes its calls and exits 0
    # empty → JSON [port, …], with a copy of each socket as ancillary data; -1, -2: the ends of the connection queue
    SHARE_PORTS = 69
    HELLO = 71  # proof of incarnation, on links between hosts: `wire/remote_frames.py`
    # JSON {"room_bytes": n or null} → JSON of `engine/library_comparison.LibraryComparison`; only a trial's worker
    COMPARE = 72
    METRICS = 70  # empty → JSON {family: [[suffix, labels, value], …]} as packed by `observability/exposition.py`


CALLS_AND_MEMORY = b"calls"


class Flag(IntEnum):
    """Bits of the header."""

    NONE = 0
    BULK = 1  # request: the bulk lane, else the interactive one
    WAIT = 2  # request: wait for room in the worker instead of failing with OVERLOADED
    TIMINGS = 4  # reply: the payload starts with a `Timings` block
    # Request: the interactive lane, whatever its size; BULK then only selects the link.
    INTERACTIVE = 8


_FLAG_OF = dict(zip(LANES, (Flag.INTERACTIVE, Flag.BULK), strict=True))


def in_lane(flags: int, word: str | None) -> int:
    """Return `flags` of a request in the lane that its caller chose by `word`; unchanged if that is None.

    Raises:
        InvalidInput: `word` is not in `LANES`.
    """
    if word is None:
        return flags
    if (chosen := _FLAG_OF.get(word)) is None:
        raise InvalidInput(f"`{LANE_KEY}` is {word[:80]!r}, not one of {', '.join(LANES)}")
    return flags | chosen


class Header(NamedTuple):
    """The parsed header; `length` counts context and payload. `context` is set once the frame is complete."""

    length: int
    type: int
    method: int
    flags: int
    id: int
    deadline_ms: int
    context_bytes: int
    context: bytes = b""


class Timings(NamedTuple):
    """Cost of one reply: characters, tokens, and nanoseconds since the worker received the request.

    The order is that of `tei.v1.Metadata`, fields 1 to 6.
    """

    chars: int
    tokens: int
    total_ns: int
    tokenization_ns: int
    queue_ns: int
    inference_ns: int

    def headers(self) -> dict[str, str]:
        """Return TEI's eight response headers, which are gRPC's initial metadata too; times in milliseconds."""
        total_ms = str(self.total_ns // _NS_PER_MS)
        return {
            "x-compute-type": "gpu+optimized",
            "x-compute-time": total_ms,
            "x-compute-characters": str(self.chars),
            "x-compute-tokens": str(self.tokens),
            "x-total-time": total_ms,
            "x-tokenization-time": str(self.tokenization_ns // _NS_PER_MS),
            "x-queue-time": str(self.queue_ns // _NS_PER_MS),
            "x-inference-time": str(self.inference_ns // _NS_PER_MS),
        }

    def pack(self) -> bytes:
        """Pack the block of 40 bytes at the start of a reply flagged TIMINGS."""
        return TIMINGS.pack(*self)


def pack_header(
    length: int, type: FrameType, method: int, id: int, flags: int = 0, deadline_ms: int = 0, context_bytes: int = 0
) -> bytes:
    """Pack the 24 bytes before a context and a payload, which have `length` bytes together."""
    return HEADER.pack(length, type, method, flags, id, deadline_ms, context_bytes)


def unpack_header(buffer: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """Parse the header at `offset`; the buffer must hold 24 bytes from there."""
    return Header(*HEADER.unpack_from(buffer, offset))


def split_timings(payload: Received) -> tuple[Timings, Received]:
    """Return the timings of a reply and the payload after them; a large payload is not copied."""
    rest = payload if len(payload) <= _OWN_BUFFER_BYTES else memoryview(payload)
    return Timings._make(TIMINGS.unpack_from(payload)), rest[TIMINGS.size :]


def retry_after_ms(error: TeimgrError) -> int:
    """Return the `deadline_ms` of an ERROR frame: when to try again; 0 without an estimate."""
    return int(max(0.0, error.retry_after_s or 0.0) * 1000)


def pack_error(error: TeimgrError) -> bytes:
    """Pack the payload of an ERROR frame: the code in a byte, the message, a NUL, and the index of a faulty input."""
    index = "" if error.input_index is None else error.input_index
    return bytes((error.code,)) + f"{error.message}\0{index}".encode("utf-8", "replace")


def unpack_error(payload: Received, retry_after_ms: int = 0) -> TeimgrError:
    code = payload[0] if payload else 0
    message, end, index = bytes(payload[1:]).decode("utf-8", "replace").rpartition("\0")
    return error_from_code(
        code,
        message if end else index,
        input_index=int(index) if end and _INDEX.fullmatch(index) else None,
        retry_after_s=retry_after_ms / 1000 or None,
    )


_INDEX = re.compile("[0-9]{1,9}")

# A payload above this size is received straight into its own buffer instead of through the shared one.
_OWN_BUFFER_BYTES = 64 * 1024
_SHARED_BUFFER_BYTES = 256 * 1024
_LINGER_S = 0.001  # longest wait of a frame that may linger
# Written at once to a connection over TLS: uvloop encrypts all of it in that call, 40 MiB in 50 to 115 ms.
_ENCRYPTED_BYTES = 2**21
# Parts, two per frame, at which frames are flushed before the end of a busy turn, so that the processes on both sides
# work in parallel.
_MAX_QUEUED_PARTS = 32


class FrameProtocol(asyncio.BufferedProtocol):
    """One end of a link. Subclasses implement `frame_received` and `link_lost`.

    Sending never blocks: the frames of one loop tick leave in one write, and producers observe `unsent_bytes` for
    backpressure. A frame longer than `max_frame_bytes` closes the link, because it cannot be skipped unread.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[Payload] = []
        self._is_encrypted = False
        self._has_rest = False  # of a large write, for the next turn of the loop
        self._closes = False
        self._flush_scheduled = False
        self._linger: asyncio.TimerHandle | None = None
        self._shared = bytearray(_SHARED_BUFFER_BYTES)
        self._filled = 0
        self._header: Header | None = None
        self._own = bytearray()
        self._own_filled = 0

    def frame_received(self, header: Header, payload: Received) -> None:
        """Process a complete frame; its context, if any, is in the header."""
        raise NotImplementedError

    def link_lost(self, error: Exception | None) -> None:
        """The connection was lost; called once."""
        raise NotImplementedError

    @property
    def unsent_bytes(self) -> int:
        waiting = sum(len(part) for part in self._outgoing)
        return waiting + (self._transport.get_write_buffer_size() if self._transport else 0)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._closes and not self._transport.is_closing()

    def send(
        self,
        type: FrameType,
        method: int,
        id: int,
        payload: Payload = b"",
        *,
        flags: int = 0,
        deadline_ms: int = 0,
        linger: bool = False,
        context: bytes = b"",
        before: bytes = b"",
    ) -> None:
        """Queue one frame, to be written with others by the end of this loop tick; a closed link drops it.

        `before` is the beginning of the payload, if the payload is in two parts.

        A frame that may `linger` waits up to a millisecond for others: a stream's frames come one per tick, and one
        write for each would be a third of a stream's cost.
        """
        if not self.is_open:
            return
        length = len(context) + len(before) + len(payload)
        head = pack_header(length, type, method, id, flags, deadline_ms, len(context))
        self._outgoing.append(b"".join((head, context, before)))
        if payload:
            self._outgoing.append(payload)
        if self._has_rest:
            return
        if len(self._outgoing) >= _MAX_QUEUED_PARTS:
            self._flush()
        elif linger:
            if self._linger is None and not self._flush_scheduled:
                self._linger = self._loop.call_later(_LINGER_S, self._flush)
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def abort(self) -> None:
        """Close at once; queued frames are dropped."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Write the queued frames, then close."""
        self._closes = True
        if not self._has_rest:
            self._flush()

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        outgoing, self._outgoing = self._outgoing, []
        if self._is_encrypted:
            self._keep_rest(outgoing)
        if outgoing and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(outgoing)
        if self._closes and not self._has_rest and self._transport is not None:
            self._transport.close()

    def _keep_rest(self, outgoing: list[Payload]) -> None:
        """Leave `_ENCRYPTED_BYTES` in `outgoing`; the rest is written in the next turns of the loop."""
        room = _ENCRYPTED_BYTES
        for place, part in enumerate(outgoing):
            if len(part) > room:
                self._outgoing = [memoryview(part)[room:], *outgoing[place + 1 :]]
                outgoing[place:] = [memoryview(part)[:room]]
                break
            room -= len(part)
        self._has_rest = bool(self._outgoing)
        if self._has_rest:
            self._loop.call_soon(self._flush)

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._is_encrypted = transport.get_extra_info("sslcontext") is not None

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._outgoing.clear()
        if self._linger is not None:
            self._linger.cancel()
        self.link_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Receive into the incomplete large payload, else into the shared buffer."""
        if self._own:
            return memoryview(self._own)[self._own_filled :]
        return memoryview(self._shared)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._own:
            self._own_filled += nbytes
            if self._own_filled == len(self._own):
                self._finish_own()
            return
        self._filled += nbytes
        self._parse()

    def eof_received(self) -> bool:
        return False

    def _parse(self) -> None:
        offset = 0
        shared = self._shared
        while self._filled - offset >= HEADER.size:
            header = unpack_header(shared, offset)
            if header.length > self._max_frame_bytes:
                self._break()
                return
            end = offset + HEADER.size + header.length
            if end > self._filled:
                if header.length > _OWN_BUFFER_BYTES:
                    if header.context_bytes > _OWN_BUFFER_BYTES:
                        self._break()
                        return
                    if self._filled - offset >= HEADER.size + header.context_bytes:
                        self._start_own(header, offset + HEADER.size)
                        return
                break
            header, start = _with_context(header, shared, offset + HEADER.size)
            payload = bytes(memoryview(shared)[start:end])
            offset = end
            self.frame_received(header, payload)
        remaining = self._filled - offset
        if offset and remaining:
            shared[:remaining] = shared[offset : self._filled]
        self._filled = remaining

    def _start_own(self, header: Header, start: int) -> None:
        self._header, start = _with_context(header, self._shared, start)
        self._own = _unfilled(header.length - len(self._header.context))
        self._own_filled = self._filled - start
        self._own[: self._own_filled] = memoryview(self._shared)[start : self._filled]
        self._filled = 0

    def _finish_own(self) -> None:
        assert self._header is not None
        header, payload = self._header, self._own
        self._header, self._own, self._own_filled = None, bytearray(), 0
        self.frame_received(header, payload)

    def _break(self) -> None:
        self._filled = 0
        if self._transport is not None:
            self._transport.abort()


def _with_context(header: Header, buffer: bytearray, start: int) -> tuple[Header, int]:
    if not header.context_bytes:
        return header, start
    begin = start + min(header.context_bytes, header.length)
    return Header(*header[:-1], bytes(memoryview(buffer)[start:begin])), begin


_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.restype = ctypes.py_object
_new_bytearray.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)


def _unfilled(size: int) -> bytearray:
    """Return an uninitialised bytearray, for callers that fill all of it: zeroing 60 MB would hold a loop for 50 ms."""
    made: bytearray = _new_bytearray(None, size)
    return made


class HeadTooLong(ValueError):
    """The head of an HTTP request or response is longer than `MAX_HEAD_BYTES`."""


class HttpRequest(NamedTuple):
    """A client's request in `dialect`."""

    dialect: str
    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = {}
    body: Buffer = b""


class HttpReply(NamedTuple):
    """The response; the content type is among the headers."""

    status: int
    headers: Mapping[str, str]
    body: Buffer


def request_head(request: HttpRequest) -> bytes:
    """Return the payload up to the body; raises HeadTooLong."""
    return _http_head({name: value for name, value in request._asdict().items() if name != "body"})


def read_request(payload: Buffer) -> HttpRequest:
    """Parse a request; the body is a view of `payload`. Raises ValueError if the payload is malformed."""
    head, body = _split_http(payload)
    try:
        dialect, method, path = (_text_in(head[name]) for name in ("dialect", "method", "path"))
        return HttpRequest(dialect, method, path, _text_in(head["query"]), _headers_in(head), body)
    except KeyError as error:
        raise ValueError(f"the head of an HTTP request lacks {error}") from error


def reply_head(reply: HttpReply) -> bytes:
    """Return the payload up to the body; raises HeadTooLong."""
    return _http_head({"status": reply.status, "headers": reply.headers})


def read_reply(payload: Buffer) -> HttpReply:
    """Parse a reply; the body is a view of `payload`. Raises ValueError if the payload is malformed."""
    head, body = _split_http(payload)
    status = head.get("status")
    if not isinstance(status, int) or not 200 <= status <= 599:
        raise ValueError("the head of an HTTP reply has no status")
    return HttpReply(status, _headers_in(head), body)


def _http_head(values: Mapping[str, object]) -> bytes:
    text = orjson.dumps(values)
    if len(text) > MAX_HEAD_BYTES:
        raise HeadTooLong(f"the HTTP head has {len(text)} bytes, the limit is {MAX_HEAD_BYTES} bytes")
    return _HTTP_HEAD.pack(len(text)) + text


def _split_http(payload: Buffer) -> tuple[dict[str, object], memoryview]:
    view = memoryview(payload)
    if len(view) < _HTTP_HEAD.size:
        raise ValueError("the HTTP payload is too short for the length of its head")
    (length,) = _HTTP_HEAD.unpack_from(view)
    end = _HTTP_HEAD.size + length
    if length > MAX_HEAD_BYTES or end > len(view):
        raise ValueError(f"a head of {length} bytes in a payload of {len(view)}")
    head = orjson.loads(view[_HTTP_HEAD.size : end])
    if not isinstance(head, dict):
        raise ValueError("the HTTP head is not a JSON object")  # noqa: TRY004
    return head, view[end:]


def _text_in(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the HTTP head has {value!r} in place of a string")  # noqa: TRY004
    return value


def _headers_in(head: Mapping[str, object]) -> dict[str, str]:
    found = head.get("headers")
    if not isinstance(found, dict):
        raise ValueError("`headers` of the HTTP head is not a JSON object")  # noqa: TRY004
    return {_text_in(name): _text_in(value) for name, value in found.items()}
