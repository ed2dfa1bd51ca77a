"""Every failure of REST has one JSON shape, the status of its code, and no secret."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Match, Route
from starlette.types import Scope
from tests.support.rest_listener import Front, failed, listening
from yarl import URL

from teimgr.api.rest.error_answers import error_response
from teimgr.config.auth import ApiKeyEntry, Auth
from teimgr.config.settings import Settings
from teimgr.errors import Code, TeimgrError, error_from_code
from teimgr.observability.troubleshooting import ADVICE
from teimgr.wire.status import STATUS


@pytest.mark.clause("M2.7-traversal")
@pytest.mark.parametrize(
    "path", ["a%2Fb", "..%2Fsecret", "..%2fsecret/logs", "a%2Flogs", "a%5Cb", "%2e%2e%2f%2e%2e%2fx/logs"]
)
async def test_an_encoded_separator_in_a_path_is_422(front: Front, path: str, tmp_path) -> None:
    (tmp_path / "secret.log").write_text("secret\n")
    failure = await front.call("GET", URL(f"{front.url}/instances/{path}", encoded=True), 422)
    assert "path separators" in failed(failure, "INVALID_INSTANCE_NAME")


@pytest.mark.clause("M2.7-traversal")
@pytest.mark.parametrize("name", ["a%252Fb", "..", "%2e%2e", "a%00b", "a%20b", "%C3%A9"])
async def test_a_name_that_cannot_exist_has_no_log(front: Front, name: str) -> None:
    async with front.http.get(URL(f"{front.url}/instances/{name}/logs", encoded=True)) as reply:
        assert reply.status in (404, 422)
        assert set(await reply.json()) == {"error", "code", "timestamp"}


@pytest.mark.clause("M2.2-query")
@pytest.mark.parametrize("query", ["start=x", "start=", "end=1.5", "start=2147483648", "end=-2147483649"])
async def test_an_index_that_is_no_i32_is_400(front: Front, query: str) -> None:
    failed(await front.call("GET", f"/instances/a/logs?{query}", 400), "VALIDATION_ERROR")


@pytest.mark.clause("M2-unknown-route")
@pytest.mark.parametrize("path", ["/", "/nope", "/instances/", "/instances/a/", "/instances/a/b/c", "/health/"])
async def test_an_unknown_route_is_404_in_the_same_shape(front: Front, path: str) -> None:
    assert path in failed(await front.call("GET", path, 404), "NOT_FOUND")


async def test_an_unknown_route_is_compared_with_others_only_if_it_is_short_and_a_method_takes_one_match_of_each(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either took the loop 10 to 14 ms; now a few at a time leave turns to others."""
    compared, matched = 0, Counter[int]()
    real = Route.matches

    def count(*given: Any) -> difflib.SequenceMatcher[Any]:
        nonlocal compared
        compared += 1
        return made(*given)

    def matches(self: Route, scope: Scope) -> tuple[Match, Scope]:
        matched[id(self)] += 1
        return real(self, scope)

    made = difflib.SequenceMatcher
    monkeypatch.setattr(difflib, "SequenceMatcher", count)
    monkeypatch.setattr(APIRoute, "matches", matches)
    long = "/instances/" + "abcdefghij" * 10
    await front.call("GET", f"{long}/healthlogs", 404)
    assert not compared
    matched.clear()
    await front.call("PUT", f"{long}/logs", 405)
    assert max(matched.values()) <= 3  # to find its permission, to find it, and to say what is allowed
    matched.clear()
    failure = await front.call("PUT", f"/models/{'a/' * 8000}download/events", 400)
    assert "16023 bytes, more than 12288" in failed(failure, "VALIDATION_ERROR")
    assert not matched


@pytest.mark.clause("M2-unknown-route")
@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/instances", "GET, HEAD, POST"),
        ("PUT", "/instances/a", "GET, HEAD, PATCH, DELETE"),
        ("GET", "/instances/a/start", "POST"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
async def test_another_method_is_405_and_says_which_are_allowed(
    front: Front, method: str, path: str, allowed: str
) -> None:
    async with front.http.request(method, path) as reply:
        assert (reply.status, reply.headers["Allow"]) == (405, allowed)
        failed(await reply.json(), "METHOD_NOT_ALLOWED")


@pytest.mark.clause("M2.2-internal")
async def test_a_defect_of_ours_is_500_and_tells_nothing(front: Front, monkeypatch) -> None:
    def broken() -> None:
        raise RuntimeError("the secret of /etc/passwd")

    monkeypatch.setattr(front.fleet, "list", broken)
    failure = await front.call("GET", "/instances", 500)
    assert "secret" not in failed(failure, "INTERNAL_ERROR")


@pytest.mark.clause("M2.2-shape", "M2.2-codes", "D-queue")
@pytest.mark.parametrize("code", Code)
def test_every_failure_has_its_status_and_says_when_to_come_back(code: Code) -> None:
    response = error_response(error_from_code(code, "why"))
    assert response.status_code == STATUS[code].http
    assert failed(json.loads(bytes(response.body)), code.name) == "why"
    assert "Retry-After" not in response.headers  # the time is not known
    response = error_response(error_from_code(code, "why", retry_after_s=17.2))
    assert response.headers.get("Retry-After") == ("18" if STATUS[code].http in (429, 503) else None)
    response = error_response(error_from_code(code, "why", retry_after_s=TeimgrError.UNTOLD))
    assert "Retry-After" not in response.headers


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/jina/v1/nope", {"detail": "No route /jina/v1/nope"}),
        ("/voyage/nope", {"detail": "No route /voyage/nope"}),
        (
            "/vllm/nope",
            {"error": {"message": "No route /vllm/nope", "type": "NotFoundError", "param": None, "code": 404}},
        ),
        ("/infinity/nope", {"error": {"message": "No route /infinity/nope", "type": None, "param": None, "code": 404}}),
    ],
)
async def test_below_a_dialects_prefix_an_unknown_route_has_its_shape(
    front: Front, path: str, shape: dict[str, object]
) -> None:
    for method in ("GET", "POST", "DELETE"):
        assert await front.call(method, path, 404) == shape


async def linked(front: Front, path: str, status: int) -> str:
    """The address in the header `Link` of a refused GET; empty without one."""
    async with front.http.get(path) as reply:
        assert reply.status == status
        found = re.fullmatch(r'<(.+)>; rel="help"', reply.headers.get("Link", ""))
    return found[1] if found else ""


async def test_every_code_has_a_section_with_its_remedies(front: Front) -> None:
    async with front.http.get("/docs/errors") as reply:
        page = unescape(re.sub("</?code>", "`", await reply.text()))
        assert reply.headers["Content-Security-Policy"].startswith("default-src 'none'")
    for code in Code:
        assert f'<section id="{code.name.lower()}">' in page
        assert all(sentence in page for sentence in ADVICE[code].remedies)


@pytest.mark.parametrize(
    ("path", "status", "anchor"),
    [
        ("/instances/nobody", 404, "instance_not_found"),
        ("/instances?state=running", 400, "validation_error"),
        ("/instances/a%2Fb", 422, "invalid_instance_name"),
    ],
)
async def test_a_refusal_links_to_its_code(front: Front, path: str, status: int, anchor: str) -> None:
    assert await linked(front, path, status) == f"/docs/errors#{anchor}"


async def test_what_has_no_code_has_no_link(front: Front) -> None:
    assert await linked(front, "/nope", 404) == ""


async def test_who_has_no_key_can_read_what_to_do(tmp_path: Path) -> None:
    key = ApiKeyEntry(name="a", key="k" * 20, rights=("read",))
    auth = Auth(enabled=True, providers=("api_keys",), api_keys=(key,))
    settings = replace(Settings(state_file=tmp_path / "state.toml"), auth=auth)
    async with listening(settings) as front, aiohttp.ClientSession(front.url) as front.http:
        link = await linked(front, "/instances", 401)
        assert link == "/docs/errors#unauthenticated"
        async with front.http.get(link) as reply:
            assert reply.status == 200
