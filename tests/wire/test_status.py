"""Every error code has a class, an HTTP status and a gRPC status."""

from __future__ import annotations

import pytest

from teimgr.errors import Code, error_from_code
from teimgr.wire.frames import (
    pack_error,
    unpack_error,
)
from teimgr.wire.status import STATUS


@pytest.mark.clause("M2.2-codes")
@pytest.mark.parametrize("code", list(Code), ids=lambda code: code.name)
def test_every_code_has_a_class_a_status_and_survives_an_error_frame(code: Code) -> None:
    error = unpack_error(pack_error(error_from_code(code, "what happened – ünïcode")))

    assert error.code is code
    assert error.message == "what happened – ünïcode"
    assert STATUS[code].http >= 400
