"""Request context: the request id and trace context of a call, in every process that works on it.

Read from a client's HTTP headers or gRPC metadata, carried in frames between processes, written to log lines and spans.
W3C trace context: https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

import functools
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import NamedTuple

REQUEST_ID = "x-request-id"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

Attributes = Mapping[str, str | int | float | bool]
"""Attributes of a span."""

_SAMPLED, _HAS_TENANT = 1, 2
_TRACE = struct.Struct("16s8sB")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_STATS = struct.Struct("<QQQQQIIII")
_NO_TRACE = bytes(_TRACE.size)
_TENANT = struct.Struct("<H")
# A client's id is echoed and logged: short, and without characters that would break a line or a header.
_VALID_ID = re.compile(r"[\x21-\x7e]{1,128}")
_numbers = count(1)
_prefix = ""


def _draw_prefix() -> None:
    """Set the random prefix of this process's request ids; repeated in a forked child."""
    global _prefix
    _prefix = os.urandom(6).hex()


_draw_prefix()
os.register_at_fork(after_in_child=_draw_prefix)


class Trace(NamedTuple):
    """A span of a trace as in a `traceparent` header: ids of 16 and 8 bytes."""

    trace_id: bytes
    span_id: bytes
    sampled: bool

    @classmethod
    def parse(cls, traceparent: str) -> Trace | None:
        """Parse a `traceparent` header; None if it is malformed, which W3C treats like an absent one."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None:
            return None
        trace_id, span_id = bytes.fromhex(match[1]), bytes.fromhex(match[2])
        return cls(trace_id, span_id, bool(int(match[3], 16) & _SAMPLED)) if any(trace_id) and any(span_id) else None


class CallStats(NamedTuple):
    """A worker's statistics of one sampled call. Times are nanoseconds; tokenization, queue and inference are means
    over the rows.

    `received_ns` is CLOCK_MONOTONIC, which all processes of a host share.
    """

    received_ns: int
    total_ns: int
    tokenization_ns: int
    queue_ns: int
    inference_ns: int
    rows: int
    rows_failed: int
    tokens: int
    chars: int
    output_dtype: str = "f32"

    def pack(self) -> bytes:
        """Return the bytes that precede a reply in its frame."""
        return _STATS.pack(*self[:9]) + self.output_dtype.encode()

    @classmethod
    def unpack(cls, block: bytes) -> CallStats:
        """The inverse of `pack`."""
        return cls._make((*_STATS.unpack_from(block), block[_STATS.size :].decode()))


class RequestContext:
    """Request id, tenant, the parent span of our work and, in workers, the statistics of a call.

    `tenant` is the number of the caller's key in `wire/tenants/table.py`, 0 without one; `meter` charges it if another
    host has admitted the caller (`worker/remote_tenants.py`).
    """

    __slots__ = ("_packed", "_request_id", "_trace", "meter", "stats", "tenant")

    def __init__(self, request_id: str, trace: Trace | None = None, packed: bytes | None = None) -> None:
        self._request_id = request_id
        self._trace = trace
        self._packed = packed
        self.stats: CallStats | None = None
        self.tenant = 0
        self.meter: object = None
        if packed is not None and len(packed) >= _TRACE.size + _TENANT.size and packed[_TRACE.size - 1] & _HAS_TENANT:
            self.tenant = _TENANT.unpack_from(packed, _TRACE.size)[0]

    @property
    def request_id(self) -> str:
        if not self._request_id and self._packed:
            begin = _TRACE.size + (_TENANT.size if self.tenant else 0)
            self._request_id = self._packed[begin:].decode("ascii", "replace")
        return self._request_id

    @property
    def trace(self) -> Trace | None:
        """The parent span of our work, if any."""
        if self._trace is None and self._packed is not None and len(self._packed) >= _TRACE.size:
            trace_id, span_id, flags = _TRACE.unpack_from(self._packed)
            self._trace = Trace(trace_id, span_id, bool(flags & _SAMPLED)) if any(trace_id) else None
        return self._trace

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> RequestContext:
        """Return the context in a client's headers; with a generated id if they lack a valid one."""
        if not headers:
            return cls(_new_id())
        traceparent = headers.get(TRACEPARENT)
        return cls(request_id_of(headers), Trace.parse(traceparent) if traceparent else None)

    @property
    def is_sampled(self) -> bool:
        """True if the trace is recorded, so that statistics are needed."""
        if self._trace is None and self._packed is not None:  # packed in a frame: read the flag without unpacking
            return len(self._packed) >= _TRACE.size and bool(self._packed[_TRACE.size - 1] & _SAMPLED)
        return self._trace is not None and self._trace.sampled

    def belongs_to(self, tenant: int) -> None:
        """Name the tenant, before the context is packed."""
        self.tenant = tenant

    def charge_by(self, meter: object) -> None:
        """Another host has admitted the caller."""
        self.meter = meter

    def pack(self) -> bytes:
        """Return the bytes that precede a request in its frame."""
        if self._packed is None:
            if self._trace is None:
                head = _of_tenant(self.tenant) if self.tenant else _NO_TRACE
            else:
                head = _TRACE.pack(*self._trace)
                if self.tenant:
                    head = head[:-1] + bytes((head[-1] | _HAS_TENANT,)) + _TENANT.pack(self.tenant)
            self._packed = head + self._request_id.encode()
        return self._packed

    @classmethod
    def unpack(cls, block: bytes) -> RequestContext:
        """The inverse of `pack`; fields are decoded on first use, which is rare."""
        return cls("", packed=block)

    def log_fields(self) -> dict[str, str]:
        """Return `request_id` and, within a trace, `trace_id` and `span_id`."""
        if self.trace is None:
            return {"request_id": self.request_id}
        trace_id, span_id, _ = self.trace
        return {"request_id": self.request_id, "trace_id": trace_id.hex(), "span_id": span_id.hex()}

    def add_stats(self, stats: CallStats) -> None:
        """Add the statistics of one inference (worker); several of one call are summed."""
        before = self.stats
        if before is not None:
            end_ns = max(before.received_ns + before.total_ns, stats.received_ns + stats.total_ns)
            began_ns = min(before.received_ns, stats.received_ns)
            stats = stats._replace(
                received_ns=began_ns,
                total_ns=end_ns - began_ns,
                rows=before.rows + stats.rows,
                rows_failed=before.rows_failed + stats.rows_failed,
                tokens=before.tokens + stats.tokens,
                chars=before.chars + stats.chars,
            )
        self.stats = stats

    def on_stats(self, packed: bytes, instance: str) -> None:
        """Receive packed `CallStats` with a reply from a worker of `instance`; a context with a span makes more."""

    def end(self, attributes: Attributes, error: str | None = None, name: str | None = None) -> None:
        """End the call's span, if it has one; `error` marks a failure that the caller did not cause."""


@functools.cache  # there are some hundreds of them
def _of_tenant(tenant: int) -> bytes:
    return _NO_TRACE[:-1] + bytes((_HAS_TENANT,)) + _TENANT.pack(tenant)


class Telemetry:
    """Creates the request context of each call. This class does not make spans; the one in `telemetry.py` does."""

    is_on = False

    def begin(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> RequestContext:
        """Return the context of a call with these headers; if `is_on`, `RequestContext.end` must be called."""
        return RequestContext.from_headers(headers)

    def close(self) -> None:
        """Export pending spans. Blocks."""


CURRENT: ContextVar[RequestContext | None] = ContextVar("request_context", default=None)
"""The request context of the current task."""


def current_tenant() -> int:
    """Return the number of the API key of the current task's call; 0 without one."""
    context = CURRENT.get()
    return 0 if context is None else context.tenant


ORDERED_BY: ContextVar[str | None] = ContextVar("ordered_by", default=None)
"""Who ordered the change that the current task makes, such as `key ops`; None for what the daemon does unasked."""


@contextmanager
def ordered_by(who: str) -> Iterator[None]:
    token = ORDERED_BY.set(who)
    try:
        yield
    finally:
        ORDERED_BY.reset(token)


@contextmanager
def use_context(context: RequestContext | None) -> Iterator[None]:
    token = CURRENT.set(context)
    try:
        yield
    finally:
        CURRENT.reset(token)


def request_id_of(headers: Mapping[str, str]) -> str:
    """Return the client's request id if it may be logged and echoed, else a generated one."""
    given = headers.get(REQUEST_ID)
    return given if given is not None and _VALID_ID.fullmatch(given) else _new_id()


def _new_id() -> str:
    return f"{_prefix}-{next(_numbers):x}"
