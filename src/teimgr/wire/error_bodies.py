"""HTTP error bodies, one per dialect.

Statuses are those of `STATUS` in `wire/status.py`, as in TEI and in REST. The other dialects have neither 422 nor 424
for an input that breaks a rule; their statuses are in `_OTHER_STATUS`. An unknown dialect gets OpenAI's body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import orjson

from teimgr.errors import Code, FailedToLoad, InputTooLong, Stopped, TeimgrError
from teimgr.wire.frames import HttpReply
from teimgr.wire.status import CODE_KEY, INPUT_INDEX, RETRY_AFTER_S, STATUS, TRY_AGAIN, retry_after_s
from teimgr.wire.tenants.table import LIMITS

TEI, TEI_OPENAI, OPENAI, COHERE, JINA = "tei", "tei-openai", "openai", "cohere", "jina"
VLLM, INFINITY, SIE, VOYAGE, WEAVIATE, OLLAMA = "vllm", "infinity", "sie", "voyage", "weaviate", "ollama"

JSON_TYPE = {"content-type": "application/json"}
_SIE_LOADING_S = 5
_SIE_LOAD_FAILED = 502  # SIE's client does not retry it
_SIE_REFUSED = {401: "UNAUTHENTICATED", 403: "FORBIDDEN"}

_OTHER_STATUS = {
    Code.INVALID_INPUT: 400,
    Code.TOKENIZER_ERROR: 400,
    Code.WRONG_MODEL_KIND: 400,
    Code.INVALID_INSTANCE_NAME: 404,
    Code.INFERENCE_FAILED: 500,
}
_TEI_PREFIXES = ("Backend error: ", "Input validation error: ")
_UNKNOWN = (Code.INSTANCE_NOT_FOUND, Code.MODEL_NOT_FOUND)


class ErrorDetails(NamedTuple):
    """The contents of an error body: HTTP status, `param`, the field at fault, and the index of the input at fault."""

    status: int
    message: str
    code: Code
    param: str | None = None
    retry_after_s: int | None = RETRY_AFTER_S
    kind: type[TeimgrError] = TeimgrError
    input_index: int | None = None


def failure(dialect: str, error: TeimgrError, param: str | None = None) -> HttpReply:
    status = _status(dialect, error.code)
    if param is None and error.code in (*_UNKNOWN, Code.AMBIGUOUS_INSTANCE):
        param = "model"
    if dialect == SIE and isinstance(error, FailedToLoad):
        status = _SIE_LOAD_FAILED
    message = _too_long(dialect, error) if isinstance(error, InputTooLong) else error.message
    retry_s = retry_after_s(error)
    return _reply(dialect, ErrorDetails(status, message, error.code, param, retry_s, type(error), error.input_index))


def refusal(dialect: str, status: int, message: str, param: str | None = None) -> HttpReply:
    """Like `failure`, for a request refused before any call: 400, 413, 415 and similar statuses."""
    return _reply(dialect, ErrorDetails(status, message, _CODE_OF_STATUS.get(status, Code.INVALID_INPUT), param))


def _reply(dialect: str, details: ErrorDetails) -> HttpReply:
    headers = JSON_TYPE | _retry_after(dialect, details) | _reason(details)
    index = details.input_index
    if dialect not in (TEI, TEI_OPENAI):
        message = _without_prefix(details.message)
        details = details._replace(message=message if index is None else f"{message} (input {index})")
    elif index is not None:  # TEI's sentence stays as it is
        headers[INPUT_INDEX] = str(index)
    return HttpReply(details.status, headers, orjson.dumps(_BODIES.get(dialect, _openai)(details)))


def _too_long(dialect: str, error: InputTooLong) -> str:
    """Return the sentence by which clients of vLLM and of Ollama recognise an exceeded context."""
    if dialect == OLLAMA:
        return f"the input length exceeds the context length: {error.given}, where the limit is {error.limit} tokens"
    if dialect != VLLM:
        return error.message
    return (
        f"This model's maximum context length is {error.limit} tokens. However, you requested {error.given} in the "
        "input. Please reduce the length of the input."
    )


def _status(dialect: str, code: Code) -> int:
    if dialect in (TEI, TEI_OPENAI):
        return STATUS[code].http
    if dialect == INFINITY and code in _UNKNOWN:
        return 400
    return _OTHER_STATUS.get(code, STATUS[code].http)


def _without_prefix(message: str) -> str:
    for prefix in _TEI_PREFIXES:
        message = message.removeprefix(prefix)
    return message


def _retry_after(dialect: str, details: ErrorDetails) -> dict[str, str]:
    if details.status not in TRY_AGAIN or details.retry_after_s is None:
        return {}
    loading = dialect == SIE and details.status == 503
    estimated = details.retry_after_s != RETRY_AFTER_S
    return {"retry-after": str(_SIE_LOADING_S if loading and not estimated else details.retry_after_s)}


def _reason(details: ErrorDetails) -> dict[str, str]:
    """Return why the call was not served, as a word that is the same in all dialects and in gRPC's trailers."""
    return {CODE_KEY: details.code.name}


def _openai(details: ErrorDetails) -> object:
    kind, code = _OPENAI_TYPES_OF_CODES.get(details.code) or _OPENAI_TYPES.get(details.status, _OPENAI_DEFAULT)
    return {"error": {"message": details.message, "type": kind, "param": details.param, "code": code}}


def _vllm(details: ErrorDetails) -> object:
    kind = _VLLM_TYPES.get(details.status, "BadRequestError" if details.status < 500 else "InternalServerError")
    return {"error": {"message": details.message, "type": kind, "param": details.param, "code": details.status}}


def _sie(details: ErrorDetails) -> object:
    error = {"code": _sie_code(details), "message": details.message}
    return {"detail": error, "error": error}


def _sie_code(details: ErrorDetails) -> str:
    if details.code in _UNKNOWN:
        return "MODEL_NOT_FOUND"
    if details.code is Code.MODEL_LOAD_FAILED:
        return "MODEL_LOAD_FAILED"
    if details.status == _SIE_LOAD_FAILED:
        return "MODEL_LOAD_FAILED"
    if details.status == 503:
        return "MODEL_NOT_LOADED" if details.kind is Stopped else "MODEL_LOADING"
    if details.status in _SIE_REFUSED:
        return _SIE_REFUSED[details.status]
    if details.code in LIMITS:
        return "RATE_LIMIT"
    if details.status == 429:
        return "RESOURCE_EXHAUSTED"
    return "INVALID_INPUT" if details.status < 500 else "INFERENCE_ERROR"


_OPENAI_DEFAULT: tuple[str, str | None] = ("invalid_request_error", None)
# Error types of files, batches, spaces and quotas, whose statuses mean something else than those of inference.
_OPENAI_TYPES_OF_CODES: Mapping[Code, tuple[str, str | None]] = {
    Code.OBJECT_NOT_FOUND: ("invalid_request_error", None),
    Code.OBJECT_IN_USE: ("invalid_request_error", "conflict"),
    Code.STORAGE_QUOTA_EXCEEDED: ("invalid_request_error", "storage_quota_exceeded"),
    Code.STORAGE_FULL: ("server_error", "storage_full"),
    **dict.fromkeys((*LIMITS, Code.CALL_OVER_QUOTA), ("tokens", "rate_limit_exceeded")),
    Code.SPACE_DIFFERS: ("invalid_request_error", "space_differs"),
}
_OPENAI_TYPES: Mapping[int, tuple[str, str | None]] = {
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("permission_error", "insufficient_permissions"),
    404: ("invalid_request_error", "model_not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    499: ("server_error", "cancelled"),
    500: ("server_error", None),
    503: ("server_error", "model_not_ready"),
    504: ("server_error", "timeout"),
}
_VLLM_TYPES = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
_BODIES: Mapping[str, Callable[[ErrorDetails], object]] = {
    TEI: lambda one: {"error": one.message, "error_type": STATUS[one.code].tei},
    TEI_OPENAI: lambda one: {"message": one.message, "code": one.status, "type": STATUS[one.code].tei},
    OPENAI: _openai,
    COHERE: lambda one: {"message": one.message},
    JINA: lambda one: {"detail": one.message},
    VLLM: _vllm,
    INFINITY: lambda one: {"error": {"message": one.message, "type": None, "param": one.param, "code": one.status}},
    SIE: _sie,
    VOYAGE: lambda one: {"detail": one.message},
    WEAVIATE: lambda one: {"error": one.message},
    OLLAMA: lambda one: {"error": one.message},
}
# Codes of refusals that have only a status. 400 and 422 mean an invalid input.
_CODE_OF_STATUS = {413: Code.MESSAGE_TOO_LARGE, 429: Code.OVERLOADED, 408: Code.TIMEOUT}
