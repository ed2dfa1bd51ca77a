"""The one table from a failure's code to what HTTP, gRPC and TEI's dialect call it."""

from __future__ import annotations

from typing import NamedTuple

from teimgr.errors import Code


class Status(NamedTuple):
    """How one code looks from outside.

    `grpc` is the number of the gRPC status (https://grpc.io/docs/guides/status-codes); `tei` is the
    `error_type` of a TEI error body.
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

STATUS: dict[Code, Status] = {
    Code.VALIDATION_ERROR: Status(400, INVALID_ARGUMENT, "Validation"),
    Code.EMPTY_INPUT: Status(400, INVALID_ARGUMENT, "Empty"),
    Code.INVALID_INPUT: Status(422, INVALID_ARGUMENT, "Validation"),
    Code.TOKENIZER_ERROR: Status(422, FAILED_PRECONDITION, "Tokenizer"),
    Code.WRONG_MODEL_KIND: Status(424, FAILED_PRECONDITION, "Backend"),
    Code.INVALID_CONFIG: Status(400, INVALID_ARGUMENT, "Validation"),
    Code.INVALID_PORT: Status(400, INVALID_ARGUMENT, "Validation"),
    Code.INVALID_INSTANCE_NAME: Status(422, INVALID_ARGUMENT, "Validation"),
    Code.INVALID_GPU_ID: Status(400, INVALID_ARGUMENT, "Validation"),
    Code.INSTANCE_NOT_FOUND: Status(404, NOT_FOUND, "Validation"),
    Code.MODEL_NOT_FOUND: Status(404, NOT_FOUND, "Validation"),
    Code.MODEL_GATED: Status(403, PERMISSION_DENIED, "Validation"),
    Code.MODEL_BUSY: Status(409, ALREADY_EXISTS, "Validation"),
    Code.MODEL_IN_USE: Status(409, FAILED_PRECONDITION, "Validation"),
    Code.INSTANCE_EXISTS: Status(409, ALREADY_EXISTS, "Validation"),
    Code.ALREADY_RUNNING: Status(409, FAILED_PRECONDITION, "Validation"),
    Code.NOT_RUNNING: Status(409, FAILED_PRECONDITION, "Validation"),
    Code.UPDATE_IN_PROGRESS: Status(409, FAILED_PRECONDITION, "Validation"),
    Code.UPDATE_FAILED: Status(409, FAILED_PRECONDITION, "Validation"),
    Code.PORT_CONFLICT: Status(422, ALREADY_EXISTS, "Validation"),
    Code.UNIMPLEMENTED: Status(501, UNIMPLEMENTED, "Backend"),
    Code.AMBIGUOUS_INSTANCE: Status(400, FAILED_PRECONDITION, "Validation"),
    Code.UNAUTHENTICATED: Status(401, UNAUTHENTICATED, "Validation"),
    Code.FORBIDDEN: Status(403, PERMISSION_DENIED, "Validation"),
    Code.MAX_INSTANCES_REACHED: Status(422, RESOURCE_EXHAUSTED, "Overloaded"),
    Code.PORT_ALLOCATION_FAILED: Status(422, RESOURCE_EXHAUSTED, "Overloaded"),
    Code.OVERLOADED: Status(429, RESOURCE_EXHAUSTED, "Overloaded"),
    Code.MESSAGE_TOO_LARGE: Status(413, RESOURCE_EXHAUSTED, "Validation"),
    Code.OUT_OF_DEVICE_MEMORY: Status(429, RESOURCE_EXHAUSTED, "Overloaded"),
    Code.BACKEND_UNAVAILABLE: Status(503, UNAVAILABLE, "Unhealthy"),
    Code.TIMEOUT: Status(504, DEADLINE_EXCEEDED, "Overloaded"),
    Code.CANCELLED: Status(499, CANCELLED, "Overloaded"),
    Code.MODEL_LOAD_FAILED: Status(500, INTERNAL, "Backend"),
    Code.MODEL_DOWNLOAD_FAILED: Status(500, INTERNAL, "Backend"),
    Code.INFERENCE_FAILED: Status(424, INTERNAL, "Backend"),
    Code.INTERNAL_ERROR: Status(500, INTERNAL, "Backend"),
}
