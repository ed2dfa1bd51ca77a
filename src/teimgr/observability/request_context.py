"""The origin of a call: the request id and the trace it belongs to, in every process that works on it.

It comes in with a client's headers or metadata, rides in frames, and is what log lines and spans are tied together by.
W3C trace context: https://www.w3.org/TR/trace-context/.
"""

from __future__ import annotations

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

_SAMPLED = 1
_TRACE = struct.Struct("16s8sB")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_ACCOUNT = struct.Struct("<QQQQQIIII")
_NO_TRACE = bytes(_TRACE.size)
# What a client says is echoed and logged: short, and nothing that breaks a line or a header.
_FIT = re.compile(r"[\x21-\x7e]{1,128}")
_numbers = count(1)
_prefix = ""


def _draw_prefix() -> None:
    """Ids of this process; a forked one draws again."""
    global _prefix
    _prefix = os.urandom(6).hex()


_draw_prefix()
os.register_at_fork(after_in_child=_draw_prefix)


class Trace(NamedTuple):
    """A span of a trace, as a traceparent names it: 16 and 8 bytes."""

    trace_id: bytes
    span_id: bytes
    sampled: bool

    @classmethod
    def parse(cls, traceparent: str) -> Trace | None:
        """The span that a header names; None where it is malformed, which W3C treats like no header."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None:
            return None
        trace_id, span_id = bytes.fromhex(match[1]), bytes.fromhex(match[2])
        return cls(trace_id, span_id, bool(int(match[3], 16) & _SAMPLED)) if any(trace_id) and any(span_id) else None


class CallStats(NamedTuple):
    """What a worker did for a call whose trace is kept. Times are nanoseconds, those of the parts means over the rows.

    `received_ns` is a moment of CLOCK_MONOTONIC, which all processes of a host share.
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
        """As it rides in front of a reply."""
        return _ACCOUNT.pack(*self[:9]) + self.output_dtype.encode()

    @classmethod
    def unpack(cls, block: bytes) -> CallStats:
        """The inverse of `pack`."""
        return cls._make((*_ACCOUNT.unpack_from(block), block[_ACCOUNT.size :].decode()))


class RequestContext:
    """Who asks: an id that ties the log lines of all processes together, and the span that our work belongs to."""

    __slots__ = ("_packed", "_request_id", "_trace", "account")

    def __init__(self, request_id: str, trace: Trace | None = None, packed: bytes | None = None) -> None:
        self._request_id = request_id
        self._trace = trace
        self._packed = packed
        self.account: CallStats | None = None

    @property
    def request_id(self) -> str:
        """What is logged and echoed."""
        if not self._request_id and self._packed:
            self._request_id = self._packed[_TRACE.size :].decode("ascii", "replace")
        return self._request_id

    @property
    def trace(self) -> Trace | None:
        """The span that our work belongs to, if any."""
        if self._trace is None and self._packed is not None and len(self._packed) >= _TRACE.size:
            trace_id, span_id, flags = _TRACE.unpack_from(self._packed)
            self._trace = Trace(trace_id, span_id, bool(flags & _SAMPLED)) if any(trace_id) else None
        return self._trace

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> RequestContext:
        """The origin that a client's headers say; an id of our own where they say none that is fit."""
        if not headers:
            return cls(_fresh_id())
        traceparent = headers.get(TRACEPARENT)
        return cls(request_id_of(headers), Trace.parse(traceparent) if traceparent else None)

    @property
    def is_sampled(self) -> bool:
        """Whether somebody keeps the trace, and wants an account."""
        if self._trace is None and self._packed is not None:  # as it came in a frame, which is not taken apart for this
            return len(self._packed) >= _TRACE.size and bool(self._packed[_TRACE.size - 1] & _SAMPLED)
        return self._trace is not None and self._trace.sampled

    def pack(self) -> bytes:
        """As it rides in front of a request."""
        if self._packed is None:
            trace = _NO_TRACE if self._trace is None else _TRACE.pack(*self._trace)
            self._packed = trace + self._request_id.encode()
        return self._packed

    @classmethod
    def unpack(cls, block: bytes) -> RequestContext:
        """The inverse of `pack`; the parts are looked for when somebody asks, which is seldom."""
        return cls("", packed=block)

    def facts(self) -> dict[str, str]:
        """For log lines."""
        if self.trace is None:
            return {"request_id": self.request_id}
        trace_id, span_id, _ = self.trace
        return {"request_id": self.request_id, "trace_id": trace_id.hex(), "span_id": span_id.hex()}

    def charge(self, account: CallStats) -> None:
        """Worker: this was done; what several inferences of one call did is added up, from the first to the last."""
        before = self.account
        if before is not None:
            end_ns = max(before.received_ns + before.total_ns, account.received_ns + account.total_ns)
            began_ns = min(before.received_ns, account.received_ns)
            account = account._replace(
                received_ns=began_ns,
                total_ns=end_ns - began_ns,
                rows=before.rows + account.rows,
                rows_failed=before.rows_failed + account.rows_failed,
                tokens=before.tokens + account.tokens,
                chars=before.chars + account.chars,
            )
        self.account = account

    def told(self, account: bytes, instance: str) -> None:
        """A worker of `instance` answered with its account; where spans are made, they are made of it."""


CURRENT: ContextVar[RequestContext | None] = ContextVar("origin", default=None)
"""The origin of what this task is doing."""


@contextmanager
def working_for(origin: RequestContext | None) -> Iterator[None]:
    """What the block does, logs and starts is for `origin`."""
    token = CURRENT.set(origin)
    try:
        yield
    finally:
        CURRENT.reset(token)


def request_id_of(headers: Mapping[str, str]) -> str:
    """The id that a client gave, when it is fit to be logged and echoed, else a fresh one."""
    given = headers.get(REQUEST_ID)
    return given if given is not None and _FIT.fullmatch(given) else _fresh_id()


def _fresh_id() -> str:
    return f"{_prefix}-{next(_numbers):x}"
