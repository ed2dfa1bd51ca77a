"""Every error code has a class, an HTTP status and a gRPC status."""

from __future__ import annotations

import pytest

from teimgr.errors import (
    Broken,
    Code,
    InvalidInput,
    Overloaded,
    Refused,
    TeimgrError,
    TryLater,
    Unavailable,
    error_from_code,
)
from teimgr.wire.frames import (
    pack_error,
    retry_after_ms,
    unpack_error,
)
from teimgr.wire.status import STATUS, TRY_AGAIN, GrpcStatus


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
