"""Every case of the HTTP tables over every surface it holds on."""

from __future__ import annotations

import pytest

from tests.conformance import tables
from tests.conformance.case import COST_HEADERS, Http, Reply
from tests.conformance.surfaces import Surfaces

# Where an answer says what it cost; at `/` and `/invocations` as well, since they are one of these.
COSTLY = (
    *("/embed", "/embed_all", "/embed_sparse", "/predict", "/rerank", "/similarity"),
    *("/v1/embeddings", "/embeddings", "/", "/invocations"),
)
ROWS = [(surface, case) for case in tables.HTTP for surface in case.surfaces]


@pytest.mark.parametrize(("surface", "case"), ROWS, ids=[f"{surface}: {case.title}" for surface, case in ROWS])
def test_http(surfaces: Surfaces, surface: str, case: Http) -> None:
    reply = surfaces.http(surface, case)

    assert reply.status == case.status, reply
    _body_is_as_said(case, reply)
    for name, value in case.told.items():
        assert reply.headers.get(name) == value, name
    _cost_is_told_where_it_should_be(case, reply)
    if callable(case.answer):
        case.answer(reply, surfaces.asking(surface, case.instance))


def _body_is_as_said(case: Http, reply: Reply) -> None:
    if isinstance(case.answer, dict | list):
        assert reply.media_type == "application/json"
        assert reply.json == case.answer
    elif isinstance(case.answer, str):
        assert reply.media_type == "text/plain"
        assert reply.text == case.answer
    elif case.answer == b"":
        assert reply.body == b""
    elif case.status == 200 and case.verb == "POST":
        assert reply.media_type == "application/json"


def _cost_is_told_where_it_should_be(case: Http, reply: Reply) -> None:
    said = [name for name in COST_HEADERS if name in reply.headers]
    if case.verb == "POST" and case.path in COSTLY and reply.status == 200:
        assert said == list(COST_HEADERS)
        assert reply.headers["x-compute-type"] == "gpu+optimized"
        assert all(int(reply.headers[name]) >= 0 for name in said[1:])
        assert reply.headers["x-total-time"] == reply.headers["x-compute-time"]
    else:
        assert said == []
