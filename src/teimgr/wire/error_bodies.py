"""How each HTTP dialect says that something failed: one table of statuses, and one body per dialect.

`STATUS` says what a code is to TEI's clients and to REST's. The other dialects know neither 422 nor 424 for an input
that breaks a rule; their statuses stand in `_ELSEWHERE`. A dialect that nobody knows here is told as OpenAI's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import orjson

from teimgr.errors import Code, TeimgrError
from teimgr.wire.http_frames import HttpReply
from teimgr.wire.status import STATUS

TEI, TEI_OPENAI, OPENAI, COHERE, JINA = "tei", "tei-openai", "openai", "cohere", "jina"
VLLM, INFINITY, SIE = "vllm", "infinity", "sie"

JSON_TYPE = {"content-type": "application/json"}
RETRY_AFTER_S = 1
_SIE_LOADING_S = 5
_TRY_AGAIN = (429, 503)

_ELSEWHERE = {
    Code.INVALID_INPUT: 400,
    Code.TOKENIZER_ERROR: 400,
    Code.WRONG_MODEL_KIND: 400,
    Code.INVALID_INSTANCE_NAME: 404,
    Code.INFERENCE_FAILED: 500,
}
_TEI_PREFIXES = ("Backend error: ", "Input validation error: ")
_UNKNOWN = (Code.INSTANCE_NOT_FOUND, Code.MODEL_NOT_FOUND)


class Fault(NamedTuple):
    """A failure to be told: `status` is HTTP's, `param` the field it is about."""

    status: int
    message: str
    code: Code
    param: str | None = None


def failure(dialect: str, error: TeimgrError, param: str | None = None) -> HttpReply:
    """What a client of `dialect` is answered when a call fails with `error`."""
    status = _status(dialect, error.code)
    if param is None and error.code in (*_UNKNOWN, Code.AMBIGUOUS_INSTANCE):
        param = "model"
    return _reply(dialect, Fault(status, error.message, error.code, param))


def refusal(dialect: str, status: int, message: str, param: str | None = None) -> HttpReply:
    """The same for a request that is refused before anything is called: 400, 413, 415 and their like."""
    return _reply(dialect, Fault(status, message, _CODE_OF_STATUS.get(status, Code.INVALID_INPUT), param))


def _reply(dialect: str, fault: Fault) -> HttpReply:
    if dialect not in (TEI, TEI_OPENAI):
        fault = fault._replace(message=_without_prefix(fault.message))
    value = _BODIES.get(dialect, _openai)(fault)
    return HttpReply(fault.status, JSON_TYPE | _patience(dialect, fault), orjson.dumps(value))


def _status(dialect: str, code: Code) -> int:
    if dialect in (TEI, TEI_OPENAI):
        return STATUS[code].http
    if dialect == INFINITY and code in _UNKNOWN:
        return 400
    return _ELSEWHERE.get(code, STATUS[code].http)


def _without_prefix(message: str) -> str:
    """The sentence without the words that TEI puts before it."""
    for prefix in _TEI_PREFIXES:
        message = message.removeprefix(prefix)
    return message


def _patience(dialect: str, fault: Fault) -> dict[str, str]:
    """When to come again, where that may help."""
    if fault.status not in _TRY_AGAIN:
        return {}
    loading = dialect == SIE and fault.status == 503
    return {"retry-after": str(_SIE_LOADING_S if loading else RETRY_AFTER_S)}


def _tei(fault: Fault) -> object:
    return {"error": fault.message, "error_type": STATUS[fault.code].tei}


def _tei_openai(fault: Fault) -> object:
    return {"message": fault.message, "code": fault.status, "type": STATUS[fault.code].tei}


def _openai(fault: Fault) -> object:
    kind, code = _OPENAI_TYPES.get(fault.status, ("invalid_request_error", None))
    return {"error": {"message": fault.message, "type": kind, "param": fault.param, "code": code}}


def _cohere(fault: Fault) -> object:
    return {"message": fault.message}


def _jina(fault: Fault) -> object:
    return {"detail": fault.message}


def _vllm(fault: Fault) -> object:
    kind = _VLLM_TYPES.get(fault.status, "BadRequestError" if fault.status < 500 else "InternalServerError")
    return {"error": {"message": fault.message, "type": kind, "param": fault.param, "code": fault.status}}


def _infinity(fault: Fault) -> object:
    return {"error": {"message": fault.message, "type": None, "param": fault.param, "code": fault.status}}


def _sie(fault: Fault) -> object:
    told = {"code": _sie_code(fault), "message": fault.message}
    return {"detail": told, "error": told}


def _sie_code(fault: Fault) -> str:
    if fault.code in _UNKNOWN:
        return "MODEL_NOT_FOUND"
    if fault.code is Code.MODEL_LOAD_FAILED:
        return "MODEL_LOAD_FAILED"
    if fault.status == 503:
        return "MODEL_LOADING"
    if fault.status == 429:
        return "RESOURCE_EXHAUSTED"
    return "INVALID_INPUT" if fault.status < 500 else "INFERENCE_ERROR"


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
_BODIES: Mapping[str, Callable[[Fault], object]] = {
    TEI: _tei,
    TEI_OPENAI: _tei_openai,
    OPENAI: _openai,
    COHERE: _cohere,
    JINA: _jina,
    VLLM: _vllm,
    INFINITY: _infinity,
    SIE: _sie,
}
# Codes of refusals that have none of their own; 400 and 422 are inputs that break a rule.
_CODE_OF_STATUS = {413: Code.MESSAGE_TOO_LARGE, 429: Code.OVERLOADED, 408: Code.TIMEOUT}
