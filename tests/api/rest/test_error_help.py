"""Error replies of REST lead to the page of their code."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import aiohttp
import pytest
from tests.support.rest_listener import Front, listening

from teimgr.config.auth import ApiKeyEntry, Auth
from teimgr.config.settings import Settings
from teimgr.errors import Code
from teimgr.observability.troubleshooting import ADVICE


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
