"""Error bodies of dialects whose clients act on the code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from teimgr.errors import (
    Broken,
    CallOverQuota,
    Code,
    ConcurrentTokensExceeded,
    DailyTokensExceeded,
    FailedToLoad,
    Forbidden,
    InvalidInput,
    Overloaded,
    Refused,
    Stopped,
    TeimgrError,
    TokenRateExceeded,
    TryLater,
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
    STATUS,
    TEI,
    TEI_OPENAI,
    TRY_AGAIN,
    VLLM,
    VOYAGE,
    WEAVIATE,
    GrpcStatus,
    failure,
    status_name,
)
from teimgr.wire.frames import (
    pack_error,
    retry_after_ms,
    unpack_error,
)

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


@pytest.mark.clause("M2.2-codes")
@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.name)
def test_every_code_has_a_class_a_status_and_survives_an_error_frame(code: Code) -> None:
    error = unpack_error(pack_error(error_from_code(code, "what happened – ünïcode")))

    assert error.code is code
    assert error.message == "what happened – ünïcode"
    assert STATUS[code].http >= 400


@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.name)
def test_the_group_of_an_error_and_its_status_agree_on_whether_to_try_again(code: Code) -> None:
    error, status = error_from_code(code, ""), STATUS[code].http
    if isinstance(error, TryLater):
        timed_out, cancelled, no_room_for_an_instance, full_disk = 504, 499, 422, 507
        assert status in (*TRY_AGAIN, timed_out, cancelled, no_room_for_an_instance, full_disk)
    elif isinstance(error, Refused):
        assert status in (*range(400, 429), 501)
    else:
        assert isinstance(error, Broken)
        assert status in (424, 500)


@pytest.mark.parametrize(
    ("error", "pushback"),
    [
        *((Overloaded(), "1000"), (Unavailable("loading"), "1000"), (InvalidInput("a"), None)),
        *(
            (Overloaded(retry_after_s=estimate), told)
            for estimate, told in ((0.2, "1000"), (3.4, "4000"), (99, "30000"))
        ),
    ],
)
def test_who_may_come_back_is_told_when(error: TeimgrError, pushback: str | None) -> None:
    assert dict(GrpcStatus.of(error).metadata).get("grpc-retry-pushback-ms") == pushback


def test_what_is_left_of_a_load_is_told_to_its_end_also_where_too_many_wait_for_it() -> None:
    for error in (Overloaded(), Unavailable("loading")):
        error.try_after_load(95.5)
        assert dict(GrpcStatus.of(error).metadata)["grpc-retry-pushback-ms"] == "96000"


def test_the_time_to_come_back_survives_an_error_frame() -> None:
    refused, other = Overloaded(retry_after_s=3.4), Unavailable("loading")

    assert unpack_error(pack_error(refused), retry_after_ms(refused)).retry_after_s == 3.4
    assert unpack_error(pack_error(other), retry_after_ms(other)).retry_after_s is None
