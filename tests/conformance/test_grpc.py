"""Every case of the gRPC tables over every surface it holds on."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from tests.conformance import tables
from tests.conformance.case import Rpc
from tests.conformance.surfaces import Surfaces

ROWS = [(surface, case) for case in tables.GRPC for surface in case.surfaces]


@pytest.mark.parametrize(("surface", "case"), ROWS, ids=[f"{surface}: {case.title}" for surface, case in ROWS])
def test_grpc(surfaces: Surfaces, surface: str, case: Rpc) -> None:
    replies = surfaces.grpc(surface, case)

    assert replies.status == case.status, replies
    if case.status != "OK":
        assert fnmatchcase(replies.details, case.details.replace("[", "[[]")), replies
    if case.answers is not None:
        assert len(replies.messages) == case.answers
    if case.answer is not None:
        case.answer(replies, surfaces.calling(surface, case.instance))
