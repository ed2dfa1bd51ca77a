"""From what a server said to the exception it meant."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import grpc

from teimgr.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    Forbidden,
    InferenceFailed,
    InstanceExists,
    InstanceNotFound,
    Internal,
    InvalidInput,
    Overloaded,
    Refused,
    TeimgrError,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unsupported,
    WrongModelKind,
    error_from_code,
)
from teimgr.wire.status import STATUS

# Trailing metadata in which teimgr's mux names the code; other servers leave only the status.
CODE_KEY = "x-teimgr-code"

_BY_GRPC: dict[grpc.StatusCode, type[TeimgrError]] = {
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidInput,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.NOT_FOUND: InstanceNotFound,
    grpc.StatusCode.ALREADY_EXISTS: InstanceExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.FAILED_PRECONDITION: WrongModelKind,
    grpc.StatusCode.OUT_OF_RANGE: TooLarge,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.INTERNAL: Internal,
    grpc.StatusCode.DATA_LOSS: InferenceFailed,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
}


def from_grpc(error: grpc.aio.AioRpcError) -> TeimgrError:
    """The exception behind a gRPC status; the text stays as the server wrote it."""
    return from_status(error.code(), error.details(), error.trailing_metadata())


def from_status(status: grpc.StatusCode, details: str | None, trailing: Any) -> TeimgrError:
    """The exception behind the status a call ended with; `trailing` is its metadata."""
    message = details or status.name
    for key, value in trailing or ():
        if key == CODE_KEY and value in Code.__members__:
            return error_from_code(Code[value], message)
    kind = _BY_GRPC.get(status, Internal)
    if kind is Overloaded and "message larger than max" in message:
        kind = TooLarge
    return _with_message(kind, message)


def from_http(status: int, body: bytes) -> TeimgrError:
    """The exception behind an HTTP error reply; a body that is no teimgr error keeps its text."""
    try:
        fields = json.loads(body)
        code, message = Code[fields["code"]], str(fields["error"])
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace").strip()
        return _from_status(status, f"HTTP {status}: {text[:500]}" if text else f"HTTP {status}")
    return error_from_code(code, message)


def _from_status(status: int, message: str) -> TeimgrError:
    """Only the status is known: the one kind that has it, else whose fault it is."""
    kinds = [code for code, row in STATUS.items() if row.http == status]
    if len(kinds) == 1:
        return error_from_code(kinds[0], message)
    return Refused(message) if status < 500 else Internal(message)


def _with_message(kind: type[TeimgrError], message: str) -> TeimgrError:
    error = kind.__new__(kind)
    TeimgrError.__init__(error, message)
    return error


def first_of(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise the first failure of a task group by itself: the others are its consequences.

    Raises:
        BaseException: that failure.
    """
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raise error from None
