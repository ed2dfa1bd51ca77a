"""Error bodies of dialects whose clients act on the code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from teimgr.errors import (
    CallOverQuota,
    ConcurrentTokensExceeded,
    DailyTokensExceeded,
    FailedToLoad,
    Forbidden,
    Overloaded,
    Stopped,
    TeimgrError,
    TokenRateExceeded,
    Unauthenticated,
    Unavailable,
    error_from_code,
)
from teimgr.wire.error_bodies import (
    COHERE,
    INFINITY,
    JINA,
    OLLAMA,
    OPENAI,
    SIE,
    TEI,
    TEI_OPENAI,
    VLLM,
    VOYAGE,
    WEAVIATE,
    failure,
)
from teimgr.wire.status import GrpcStatus, status_name

# Where each dialect's clients look for what happened; with `code`, the word that they know for a quota.
ERRORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((TEI, WEAVIATE, OLLAMA), ("error",)),
    **dict.fromkeys((TEI_OPENAI, COHERE), ("message",)),
    **dict.fromkeys((JINA, VOYAGE), ("detail",)),
    **dict.fromkeys((OPENAI, VLLM, INFINITY, SIE), ("error", "message")),
}


@pytest.mark.parametrize(
    ("error", "status", "code", "retried"),
    [
        (Stopped("stopped"), 503, "MODEL_NOT_LOADED", False),
        (FailedToLoad("failed"), 502, "MODEL_LOAD_FAILED", False),
        (Unavailable("starting"), 503, "MODEL_LOADING", True),
        (Overloaded("busy"), 429, "RESOURCE_EXHAUSTED", True),
        (Unauthenticated("who"), 401, "UNAUTHENTICATED", False),
        (Forbidden("not you"), 403, "FORBIDDEN", False),
    ],
)
def test_sies_client_is_told_whether_to_try_again(error: TeimgrError, status: int, code: str, retried: bool) -> None:
    reply = failure(SIE, error)
    body: dict[str, Any] = json.loads(reply.body)
    assert (reply.status, body["error"]["code"]) == (status, code)
    assert ("retry-after" in reply.headers) == retried


def test_voyages_error_is_its_detail() -> None:
    assert json.loads(failure(VOYAGE, Unavailable("starting")).body) == {"detail": "starting"}


@pytest.mark.parametrize("dialect", ERRORS)
@pytest.mark.parametrize(
    ("error", "status", "grpc", "wait_s"),
    [
        (TokenRateExceeded("quota", 41.7), 429, "RESOURCE_EXHAUSTED", 42),
        (DailyTokensExceeded("quota", 40_000.2), 429, "RESOURCE_EXHAUSTED", 40_001),
        (ConcurrentTokensExceeded("quota"), 429, "RESOURCE_EXHAUSTED", 1),
        (Overloaded("queue", retry_after_s=3.2), 429, "RESOURCE_EXHAUSTED", 4),
        (Unavailable("starts"), 503, "UNAVAILABLE", 1),
        (Stopped("by its user"), 503, "UNAVAILABLE", None),
        (error_from_code(37, "no room", retry_after_s=TeimgrError.UNTOLD), 503, "UNAVAILABLE", None),
        (CallOverQuota("never"), 413, "RESOURCE_EXHAUSTED", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TeimgrError) else None,
)
def test_every_dialect_and_grpc_tell_quota_queue_and_absence_apart(
    dialect: str, error: TeimgrError, status: int, grpc: str, wait_s: int | None
) -> None:
    reply, call = failure(dialect, error), GrpcStatus.of(error)
    wait = {} if wait_s is None else {"retry-after": str(5 if dialect == SIE and status == 503 else wait_s)}

    assert (reply.status, status_name(call.number)) == (status, grpc)
    assert reply.headers == {"content-type": "application/json", "x-teimgr-code": error.code.name} | wait
    pushback = {} if wait_s is None else {"grpc-retry-pushback-ms": str(wait_s * 1000)}
    assert dict(call.metadata) == {"x-teimgr-code": error.code.name} | pushback
    body = json.loads(reply.body)
    for name in ERRORS[dialect]:
        body = body[name]
    assert body == error.message


def test_openais_and_sies_clients_know_a_quota_by_their_own_word() -> None:
    for error in (TokenRateExceeded("a", 2.0), DailyTokensExceeded("a", 2.0), ConcurrentTokensExceeded("a")):
        own = json.loads(failure(OPENAI, error).body)["error"]
        assert (own["type"], own["code"], own["param"]) == ("tokens", "rate_limit_exceeded", None)
        assert json.loads(failure(SIE, error).body)["error"]["code"] == "RATE_LIMIT"
