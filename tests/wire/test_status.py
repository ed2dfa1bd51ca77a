"""Every error code has a class, an HTTP status and a gRPC status."""

from __future__ import annotations

import pytest

from teimgr.errors import Code, InvalidInput, Overloaded, TeimgrError, Unavailable, error_from_code
from teimgr.wire.frames import (
    pack_error,
    retry_after_ms,
    unpack_error,
)
from teimgr.wire.status import STATUS, GrpcStatus


@pytest.mark.clause("M2.2-codes")
@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.name)
def test_every_code_has_a_class_a_status_and_survives_an_error_frame(code: Code) -> None:
    error = unpack_error(pack_error(error_from_code(code, "what happened – ünïcode")))

    assert error.code is code
    assert error.message == "what happened – ünïcode"
    assert STATUS[code].http >= 400


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


def test_the_time_to_come_back_survives_an_error_frame() -> None:
    refused, other = Overloaded(retry_after_s=3.4), Unavailable("loading")

    assert unpack_error(pack_error(refused), retry_after_ms(refused)).retry_after_s == 3.4
    assert unpack_error(pack_error(other), retry_after_ms(other)).retry_after_s is None
