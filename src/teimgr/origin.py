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


class Account(NamedTuple):
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
    def unpack(cls, block: bytes) -> Account:
        """The inverse of `pack`."""
        return cls._make((*_ACCOUNT.unpack_from(block), block[_ACCOUNT.size :].decode()))


class Origin:
    """Who asks: an id that ties the log lines of all processes together, and the span that our work belongs to."""

    __slots__ = ("_packed", "account", "request_id", "trace")

    def __init__(self, request_id: str, trace: Trace | None = None) -> None:
        self.request_id = request_id
        self.trace = trace
        self.account: Account | None = None
        self._packed: bytes | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Origin:
        """The origin that a client's headers say; an id of our own where they say none that is fit."""
        traceparent = headers.get(TRACEPARENT)
        return cls(request_id_of(headers), Trace.parse(traceparent) if traceparent else None)

    @property
    def is_sampled(self) -> bool:
        """Whether somebody keeps the trace, and wants an account."""
        return self.trace is not None and self.trace.sampled

    def pack(self) -> bytes:
        """As it rides in front of a request."""
        if self._packed is None:
            trace = _NO_TRACE if self.trace is None else _TRACE.pack(*self.trace)
            self._packed = trace + self.request_id.encode()
        return self._packed

    @classmethod
    def unpack(cls, block: bytes) -> Origin:
        """The inverse of `pack`."""
        trace_id, span_id, flags = _TRACE.unpack_from(block.ljust(_TRACE.size, b"\0"))
        trace = Trace(trace_id, span_id, bool(flags & _SAMPLED)) if any(trace_id) else None
        return cls(block[_TRACE.size :].decode("ascii", "replace"), trace)

    def facts(self) -> dict[str, str]:
        """For log lines."""
        if self.trace is None:
            return {"request_id": self.request_id}
        trace_id, span_id, _ = self.trace
        return {"request_id": self.request_id, "trace_id": trace_id.hex(), "span_id": span_id.hex()}

    def charge(self, account: Account) -> None:
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


CURRENT: ContextVar[Origin | None] = ContextVar("origin", default=None)
"""The origin of what this task is doing."""


@contextmanager
def working_for(origin: Origin | None) -> Iterator[None]:
    """What the block does, logs and starts is for `origin`."""
    token = CURRENT.set(origin)
    try:
        yield
    finally:
        CURRENT.reset(token)


def request_id_of(headers: Mapping[str, str]) -> str:
    """The id that a client gave, when it is fit to be logged and echoed, else a fresh one."""
    given = headers.get(REQUEST_ID)
    return given if given is not None and _FIT.fullmatch(given) else f"{_prefix}-{next(_numbers):x}"
