"""Error bodies of dialects whose clients act on the code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from teimgr.errors import FailedToLoad, Forbidden, Overloaded, Stopped, TeimgrError, Unauthenticated, Unavailable
from teimgr.wire.error_bodies import SIE, VOYAGE, failure


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
