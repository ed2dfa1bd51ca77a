"""Our error codes as HTTP and gRPC statuses and as types of TEI.

Clients import this module, so it imports nothing but `errors`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from teimgr.errors import Code, Stopped, TeimgrError, TenantQuotaReached

# Trailing metadata with our code, which is more specific than gRPC's status.
CODE_KEY = "x-teimgr-code"
# HTTP header of TEI's dialects and gRPC trailer of a refusal: the index of the input at fault.
INPUT_INDEX = "x-teimgr-input"
# Trailing metadata: how long gRPC clients with a retry policy wait before they retry; HTTP's is Retry-After.
PUSHBACK_KEY = "grpc-retry-pushback-ms"
RETRY_AFTER_S = 1
# Limit of an estimated wait, since other callers may stop by then, and of the rest of a load, which is independent.
_MAX_RETRY_AFTER_S = 30
_MAX_LOAD_S = 3600
TRY_AGAIN = (429, 503)
# Status messages are sent in trailers, which clients limit to a few kilobytes.
MAX_MESSAGE_CHARS = 2000


class StatusMapping(NamedTuple):
    """External representation of one code: HTTP status, gRPC status number, `error_type` of a TEI error body.

    gRPC's numbers: https://grpc.io/docs/guides/status-codes.
    """

    http: int
    grpc: int
    tei: str


OK = 0
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
NOT_FOUND = 5
ALREADY_EXISTS = 6
PERMISSION_DENIED = 7
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
UNIMPLEMENTED = 12
INTERNAL = 13
UNAVAILABLE = 14
UNAUTHENTICATED = 16
CANCELLED = 1

_NAMES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)


def status_name(number: int) -> str:
    """Return the name of a gRPC status, such as `NOT_FOUND`."""
    return _NAMES[number]


STATUS: dict[Code, StatusMapping] = {
    Code.VALIDATION_ERROR: StatusMapping(400, INVALID_ARGUMENT, "Validation"),
    Code.EMPTY_INPUT: StatusMapping(400, INVALID_ARGUMENT, "Empty"),
    Code.INVALID_INPUT: StatusMapping(422, INVALID_ARGUMENT, "Validation"),
    Code.TOKENIZER_ERROR: StatusMapping(422, FAILED_PRECONDITION, "Tokenizer"),
    Code.WRONG_MODEL_KIND: StatusMapping(424, FAILED_PRECONDITION, "Backend"),
    Code.INVALID_CONFIG: StatusMapping(400, INVALID_ARGUMENT, "Validation"),
    Code.INVALID_PORT: StatusMapping(400, INVALID_ARGUMENT, "Validation"),
    Code.INVALID_INSTANCE_NAME: StatusMapping(422, INVALID_ARGUMENT, "Validation"),
    Code.INVALID_GPU_ID: StatusMapping(400, INVALID_ARGUMENT, "Validation"),
    Code.INSTANCE_NOT_FOUND: StatusMapping(404, NOT_FOUND, "Validation"),
    Code.MODEL_NOT_FOUND: StatusMapping(404, NOT_FOUND, "Validation"),
    Code.MODEL_GATED: StatusMapping(403, PERMISSION_DENIED, "Validation"),
    Code.MODEL_BUSY: StatusMapping(409, ALREADY_EXISTS, "Validation"),
    Code.MODEL_IN_USE: StatusMapping(409, FAILED_PRECONDITION, "Validation"),
    Code.INSTANCE_EXISTS: StatusMapping(409, ALREADY_EXISTS, "Validation"),
    Code.ALREADY_RUNNING: StatusMapping(409, FAILED_PRECONDITION, "Validation"),
    Code.NOT_RUNNING: StatusMapping(409, FAILED_PRECONDITION, "Validation"),
    Code.UPDATE_IN_PROGRESS: StatusMapping(409, FAILED_PRECONDITION, "Validation"),
    Code.UPDATE_FAILED: StatusMapping(409, FAILED_PRECONDITION, "Validation"),
    Code.PORT_CONFLICT: StatusMapping(422, ALREADY_EXISTS, "Validation"),
    Code.UNIMPLEMENTED: StatusMapping(501, UNIMPLEMENTED, "Backend"),
    Code.AMBIGUOUS_INSTANCE: StatusMapping(400, FAILED_PRECONDITION, "Validation"),
    Code.UNAUTHENTICATED: StatusMapping(401, UNAUTHENTICATED, "Validation"),
    Code.FORBIDDEN: StatusMapping(403, PERMISSION_DENIED, "Validation"),
    Code.OBJECT_NOT_FOUND: StatusMapping(404, NOT_FOUND, "Validation"),
    Code.OBJECT_IN_USE: StatusMapping(409, FAILED_PRECONDITION, "Validation"),
    Code.SPACE_DIFFERS: StatusMapping(412, FAILED_PRECONDITION, "Validation"),
    Code.STORAGE_QUOTA_EXCEEDED: StatusMapping(403, RESOURCE_EXHAUSTED, "Overloaded"),
    Code.STORAGE_FULL: StatusMapping(507, RESOURCE_EXHAUSTED, "Overloaded"),
    Code.NO_HOST: StatusMapping(503, UNAVAILABLE, "Backend"),
    Code.MAX_INSTANCES_REACHED: StatusMapping(422, RESOURCE_EXHAUSTED, "Overloaded"),
    Code.PORT_ALLOCATION_FAILED: StatusMapping(422, RESOURCE_EXHAUSTED, "Overloaded"),
    Code.OVERLOADED: StatusMapping(429, RESOURCE_EXHAUSTED, "Overloaded"),
    Code.TOKEN_RATE_EXCEEDED: StatusMapping(429, RESOURCE_EXHAUSTED, "Overloaded"),
    Code.DAILY_TOKENS_EXCEEDED: StatusMapping(429, RESOURCE_EXHAUSTED, "Overloaded"),
    Code.CONCURRENT_TOKENS_EXCEEDED: StatusMapping(429, RESOURCE_EXHAUSTED, "Overloaded"),
    Code.CALL_OVER_QUOTA: StatusMapping(413, RESOURCE_EXHAUSTED, "Validation"),
    Code.MESSAGE_TOO_LARGE: StatusMapping(413, RESOURCE_EXHAUSTED, "Validation"),
    Code.OUT_OF_DEVICE_MEMORY: StatusMapping(429, RESOURCE_EXHAUSTED, "Overloaded"),
    Code.KILLED_FOR_MEMORY: StatusMapping(503, UNAVAILABLE, "Unhealthy"),
    Code.BACKEND_UNAVAILABLE: StatusMapping(503, UNAVAILABLE, "Unhealthy"),
    Code.TIMEOUT: StatusMapping(504, DEADLINE_EXCEEDED, "Overloaded"),
    Code.CANCELLED: StatusMapping(499, CANCELLED, "Overloaded"),
    Code.STATE_NOT_SAVED: StatusMapping(503, UNAVAILABLE, "Unhealthy"),
    Code.MODEL_LOAD_FAILED: StatusMapping(500, INTERNAL, "Backend"),
    Code.MODEL_DOWNLOAD_FAILED: StatusMapping(500, INTERNAL, "Backend"),
    Code.INFERENCE_FAILED: StatusMapping(424, INTERNAL, "Backend"),
    Code.INTERNAL_ERROR: StatusMapping(500, INTERNAL, "Backend"),
}


def retry_after_s(error: TeimgrError) -> int | None:
    """Return whole seconds after which to try again, 1 to 30, more for loads and quotas; None if it depends on an
    operator."""
    if isinstance(error, Stopped) or error.retry_after_s == error.UNTOLD:
        return None
    estimate = error.retry_after_s or RETRY_AFTER_S
    if isinstance(error, TenantQuotaReached):
        return math.ceil(max(estimate, RETRY_AFTER_S))
    is_of_load = error.is_of_load or error.code is Code.BACKEND_UNAVAILABLE
    most = _MAX_LOAD_S if is_of_load else _MAX_RETRY_AFTER_S
    return math.ceil(min(max(estimate, RETRY_AFTER_S), most))


class GrpcStatus(NamedTuple):
    """Status that ends a gRPC call: its number, its message, and metadata for the trailers."""

    number: int = OK
    message: str = ""
    metadata: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, error: TeimgrError) -> GrpcStatus:
        mapping = STATUS[error.code]
        metadata: tuple[tuple[str, str], ...] = ((CODE_KEY, error.code.name),)
        if mapping.http in TRY_AGAIN and (seconds := retry_after_s(error)) is not None:
            metadata = (*metadata, (PUSHBACK_KEY, str(seconds * 1000)))
        if error.input_index is not None:
            metadata = (*metadata, (INPUT_INDEX, str(error.input_index)))
        return cls(mapping.grpc, error.message[:MAX_MESSAGE_CHARS], metadata)
