"""Headers of trusted proxies, and the path prefix that a proxy strips: links follow it, behind nginx too."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.api.nginx import below, needs_nginx, nginx
from tests.api.page_parts import parts
from tests.support.credentials import AUTH, SECRETS
from tests.support.rest_listener import Front, listening

from teimgr.api.rest.proxies import ProxyHeaders, TrustedProxies
from teimgr.config.settings import Settings, faults

PREFIX = "/tools/teimgr"
HTML = {"Accept": "text/html"}
VIEWS = ("/", "/ui/fleet", "/ui/instances/a", "/ui/create", "/ui/models", "/ui/devices", "/ui/alarms", "/ui/playground")


@asynccontextmanager
async def serving(settings: Settings, **more: Any) -> AsyncIterator[Front]:
    settings = replace(settings, **more)
    async with listening(settings, parts=parts(settings)) as front, aiohttp.ClientSession(front.url) as front.http:
        yield front


def prefixed(value: str) -> dict[str, str]:
    return {"X-Forwarded-Prefix": value}


async def answered(front: Front, path: str, **how: Any) -> tuple[int, Any, str]:
    async with front.http.get(path, allow_redirects=False, **how) as reply:
        return reply.status, reply.headers, await reply.text()


async def every_url(front: Front, **how: Any) -> set[str]:
    """The URLs in all views, documents and headers."""
    found = set()
    for view in VIEWS:
        status, _, text = await answered(front, view, **how)
        assert status == 200, text
        found |= set(re.findall(r"""\s(?:src|href|action)=["']([^"'#][^"']*)""", text))
    status, headers, _ = await answered(front, "/instances/nowhere", **how)
    assert status == 404
    found.add(re.findall("<(.*?)>", headers["Link"])[0])
    _, headers, text = await answered(front, "/docs", **how)
    assert "X-Forwarded-Prefix" in headers["Vary"]
    found |= set(re.findall(r'href="([^"#][^"]*)"', text))
    return found


@pytest.mark.parametrize("by", ["header", "setting"])
async def test_every_link_follows_the_prefix(settings: Settings, by: str) -> None:
    more: dict[str, Any] = {"root_path": f"{PREFIX}/"} if by == "setting" else {}
    how: dict[str, Any] = {"headers": prefixed(PREFIX)} if by == "header" else {}
    async with serving(settings, **more) as front:
        await front.create("a")
        found = await every_url(front, **how)
        assert len(found) > 20
        assert [url for url in found if not url.startswith(f"{PREFIX}/")] == []
        for url in found:  # the proxy strips it
            status, _, text = await answered(front, url.removeprefix(PREFIX).partition("#")[0], **how)
            assert status in (200, 405), (url, text)
        _, _, text = await answered(front, "/ui/fleet", **how)
        assert f'data-prefix="{PREFIX}"' in text  # where the scripts find it
        async with front.http.get("/openapi.json", **how) as reply:
            document = await reply.json()
        assert document["servers"] == [{"url": PREFIX}]
        assert "/instances" in document["paths"]


async def test_without_a_prefix_nothing_changes(settings: Settings) -> None:
    async with serving(settings) as front:
        await front.create("a")
        assert [url for url in await every_url(front) if PREFIX in url or not url.startswith("/")] == []
        async with front.http.get("/openapi.json") as reply:
            assert "servers" not in await reply.json()


async def test_redirects_and_the_session_follow_the_prefix(settings: Settings) -> None:
    async with serving(settings, auth=AUTH) as front:
        how = prefixed("/teimgr") | {"X-Forwarded-Proto": "https"}
        status, headers, _ = await answered(front, "/ui/models?x=1", headers=how | HTML)
        assert (status, headers["Location"]) == (303, "/teimgr/ui/sign-in?next=/ui/models%3Fx%3D1")
        form = {"key": SECRETS["admin"], "next": "/ui/create"}
        origin = {"Origin": front.url}
        async with front.http.post("/ui/sign-in", data=form, headers=how | origin, allow_redirects=False) as reply:
            assert reply.headers["Location"] == "/teimgr/ui/create"
            cookie = reply.headers["Set-Cookie"]
        assert "Path=/teimgr;" in cookie
        assert cookie.startswith("__Secure-teimgr-session-")
        session = how | {"Cookie": cookie.partition(";")[0]}
        assert (await answered(front, "/ui/create", headers=session))[0] == 200
        # What changes something still needs this page's own Origin.
        for foreign in ({}, {"Origin": "https://evil.example"}):
            async with front.http.post("/instances", json={}, headers=session | foreign) as reply:
                assert reply.status == 403
        async with front.http.post("/instances", json={}, headers=session | origin) as reply:
            assert reply.status == 422
        async with front.http.post("/ui/sign-in", data=form, headers=how | {"Origin": "https://evil.example"}) as reply:
            assert (reply.status, "Set-Cookie" in reply.headers) == (403, False)


@pytest.mark.parametrize(
    "value",
    [
        *(
            "https://evil.example",
            "//evil.example",
            "/a//b",
            "/..",
            "/a/../b",
            "/.",
            "teimgr",
            "/a b",
            "/a%2fb",
            "/a?b",
        ),
        *(
            "/a#b",
            '/"><script>',
            "/a'b",
            "/a;b",
            "/a\\b",
            "/\u00e9",
            "/a" * 200,
            "/a, https://evil.example",
            "/a:b",
            "/<b>",
        ),
    ],
)
async def test_what_is_no_path_of_plain_segments_is_refused_by_name(settings: Settings, value: str) -> None:
    async with serving(settings) as front:
        status, headers, text = await answered(front, "/ui/fleet", headers=prefixed(value))
        assert status == 400
        assert headers["Content-Type"] == "application/json"
        assert "X-Forwarded-Prefix: must be a path such as /teimgr" in text
    assert [fault.path for fault in faults(replace(settings, root_path=value))] == ["root_path"]


@pytest.mark.parametrize(
    ("value", "found"), [("/", ""), ("", ""), ("/a/", "/a"), ("/a, /b/", "/a/b"), ("/A-1_2~3.4/v1", "/A-1_2~3.4/v1")]
)
async def test_prefixes_of_proxies_in_a_row_are_joined(settings: Settings, value: str, found: str) -> None:
    async with serving(settings) as front:
        _, _, text = await answered(front, "/ui/fleet", headers=prefixed(value))
        assert f'data-prefix="{found}"' in text


async def test_only_trusted_proxies_are_believed(settings: Settings) -> None:
    async with serving(settings, trusted_proxies=("10.0.0.0/8",), root_path="/ours") as front:
        for value in ("/theirs", "https://evil.example"):
            _, _, text = await answered(front, "/ui/fleet", headers=prefixed(value))
            assert 'data-prefix="/ours"' in text
            assert "theirs" not in text
        front.app.state.settings = replace(front.app.state.settings, trusted_proxies=("127.0.0.0/8",))  # a reload
        _, _, text = await answered(front, "/ui/fleet", headers=prefixed("/theirs"))
        assert 'data-prefix="/theirs"' in text
    broken = replace(settings, trusted_proxies=("10.0.0.1", "10.0.0.1/8", "proxy.example", "unix", "*", "::/0"))
    assert [fault.path for fault in faults(broken)] == ["trusted_proxies[1]", "trusted_proxies[2]"]


@pytest.mark.parametrize(
    ("trusted", "client", "server", "is_trusted"),
    [
        (("10.0.0.0/8",), ("::ffff:10.1.2.3", 1), ("::", 9000), True),
        (("10.0.0.0/8",), ("::ffff:11.1.2.3", 1), ("::", 9000), False),
        (("unix",), None, ("/run/api.sock", None), True),
        (("unix",), None, ("127.0.0.1", 9000), False),  # a client that has gone already
        (("127.0.0.1",), None, ("/run/api.sock", None), False),
        (("*",), ("192.0.2.1", 1), ("::", 9000), True),
    ],
)
async def test_addresses_as_sockets_show_them(
    settings: Settings, trusted: tuple[str, ...], client: Any, server: Any, is_trusted: bool
) -> None:
    seen: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    settings = replace(settings, trusted_proxies=trusted)
    state = type("App", (), {"state": type("State", (), {"settings": settings})})
    headers = [(b"x-forwarded-prefix", b"/teimgr"), (b"x-forwarded-proto", b"https")]
    scope = {"type": "http", "app": state, "scheme": "http", "client": client, "server": server, "headers": headers}
    await ProxyHeaders(app, TrustedProxies(lambda: settings))(scope, None, None)  # type: ignore[arg-type]
    assert (seen[0]["teimgr.path_prefix"], seen[0]["scheme"]) == (("/teimgr", "https") if is_trusted else ("", "http"))


@needs_nginx
async def test_behind_nginx_every_link_leads_somewhere(settings: Settings, tmp_path: Path) -> None:
    async with serving(settings) as front:
        await front.create("a")
        with nginx(tmp_path, below(PREFIX, front.url)) as url:
            async with aiohttp.ClientSession() as outside:
                for view in VIEWS:
                    async with outside.get(f"{url}{PREFIX}{view}") as reply:
                        assert reply.status == 200, view
                        text = await reply.text()
                    for link in set(re.findall(r"""\s(?:src|href)=["']([^"'#][^"']*)""", text)):
                        async with outside.get(url + link) as reply:
                            assert reply.status == 200, (view, link)
                async with outside.get(f"{url}{PREFIX}/ui/fleet/live") as reply:
                    assert await reply.content.readline() == b"event: fleet\n"  # not held back
                async with outside.get(f"{url}{PREFIX}", allow_redirects=False) as reply:
                    assert reply.headers["Location"] == f"{url}{PREFIX}/"
                for origin, status in (("http://evil.example", 403), (url, 200)):
                    headers = {"Origin": origin}
                    async with outside.delete(f"{url}{PREFIX}/instances/a", headers=headers) as reply:
                        assert reply.status == status
