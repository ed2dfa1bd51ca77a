"""Links to images: fetched from listed hosts over checked addresses, within bounds, and refused without a hint why.

Pages of PDF documents are rendered some at a time; a call that is gone keeps its turn until its page has ended.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.support.daemon_process import WarmDaemonProcess
from tests.support.models.dual_encoders import build_clip, file_of, noise

from teimgr.config.settings import Settings, faults
from teimgr.errors import InvalidInput, Overloaded
from teimgr.wire import pdf_pages
from teimgr.worker import media_links
from teimgr.worker.media_links import LinkFetcher, PageRenderer

FILE = file_of(noise(60, 40))
HERE = ["127.0.0.0/8", "::1/128"]
MIB = 2**20
_ELSEWHERE = {"private": "http://[fd00::1]/", "unlisted": "http://example.com/", "scheme": "file:///etc/passwd"}
Make = Callable[..., LinkFetcher]


class Site:
    """A web server on 127.0.0.1 that counts its requests."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        assert request.headers["accept-encoding"] == "identity"
        assert "cookie" not in request.headers
        kind = request.path.rpartition("/")[2]
        if kind.isdigit():  # so many redirects
            raise web.HTTPFound(f"/{int(kind) - 1}" if int(kind) else "/image")
        if kind in _ELSEWHERE:
            raise web.HTTPFound(_ELSEWHERE[kind])
        if kind in ("endless", "slow"):
            reply = web.StreamResponse()
            await reply.prepare(request)
            while kind == "endless":
                await reply.write(bytes(MIB))
            await asyncio.Event().wait()
        coding = {"content-encoding": "gzip"} if kind == "compressed" else {}
        body = bytes(21 * MIB) if kind == "large" else FILE
        return web.Response(status=404 if kind == "nothing" else 200, body=body, headers={"set-cookie": "a=b"} | coding)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    app, found = web.Application(), Site()
    app.router.add_get("/{path:.*}", found.answer)
    async with TestServer(app) as server:
        assert server.port is not None
        found.port = server.port
        yield found


@pytest.fixture
def make(site: Site) -> Make:
    """A fetcher that may go to the site by the name `pictures`, which is looked up as the given addresses."""

    def fetcher(*addresses: str, networks: Sequence[str] = HERE, most_bytes: int = 40 * MIB) -> LinkFetcher:
        hosts = [f"pictures:{site.port}", "pictures:1", "[fd00::1]"]
        return LinkFetcher(hosts, networks, most_bytes, lambda host, port: addresses or ("127.0.0.1",))

    return fetcher


async def fetch(fetcher: LinkFetcher, *links: str, key: int = 0) -> list[bytes]:
    async with fetcher.fetching(links, key) as files:
        return [await files[link] for link in links]


async def test_a_file_is_fetched_once_whatever_the_proxy_of_the_environment(
    make: Make, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    link = f"http://pictures:{site.port}/image"
    assert await fetch(make(), link, link, f"http://Pictures:{site.port}/2") == [FILE] * 3
    assert sorted(site.asked) == ["/0", "/1", "/2", "/image", "/image"]


@pytest.mark.parametrize(
    "link",
    [
        "http://example.com/image",
        "http://pictures/image",
        "https://pictures/image",
        "ftp://pictures:{port}/image",
        "http://name:secret@pictures:{port}/image",
        "http://pictures:{port}\\@example.com/image",
        "http://pictures:{port}.example.com/image",
        "http://pictures:99999/image",
        "http://pictures:{port}/" + "a" * 5000,
        "http://",
    ],
)
async def test_a_link_to_what_is_not_listed_is_refused_before_anything_is_looked_up(
    make: Make, site: Site, link: str
) -> None:
    fetcher = make()
    with pytest.raises(InvalidInput, match=r"not to one of the hosts .* \(media_url_hosts\): send the file itself"):
        await fetch(fetcher, link.format(port=site.port))
    assert not site.asked


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1%1", "fd00::1", "fec0::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001::1", "2001:db8::1"),
    ],
)
async def test_one_address_that_is_not_public_refuses_the_link(make: Make, site: Site, address: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be fetched: no file of at most"):
        await fetch(make("8.8.8.8", address, networks=[]), f"http://pictures:{site.port}/image")
    assert not site.asked


def test_public_addresses_are_public() -> None:
    assert all(media_links._is_public(ipaddress.ip_address(one)) for one in ("8.8.8.8", "2606:4700::1111"))


@pytest.mark.parametrize(
    "path", ["3", "private", "unlisted", "scheme", "compressed", "large", "endless", "slow", "nothing", ":closed"]
)
async def test_what_brings_no_file_is_refused_in_the_same_words(
    make: Make, site: Site, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "slow":
        monkeypatch.setattr(media_links, "LINK_S", 0.3)
    port = 1 if path == ":closed" else site.port
    with pytest.raises(InvalidInput) as refused:
        await fetch(make(), f"http://pictures:{port}/{path}")
    said = refused.value.message.replace("0.3 s", "5 s")
    assert said == (
        "Input validation error: the link cannot be fetched: no file of at most 20,971,520 bytes came from pictures "
        "within 5 s: send the file itself, as a data URI or as base64"
    )


async def test_the_files_of_a_request_have_together_no_more_bytes_than_a_message(make: Make, site: Site) -> None:
    links = [f"http://pictures:{site.port}/{part}/image" for part in range(4)]
    assert await fetch(make(most_bytes=4 * len(FILE)), *links) == [FILE] * 4
    with pytest.raises(InvalidInput, match="cannot be fetched"):
        await fetch(make(most_bytes=4 * len(FILE) - 1), *links)


async def test_a_request_has_256_links_at_most(make: Make, site: Site) -> None:
    with pytest.raises(InvalidInput, match="the request has 10,000 links, and 256 are allowed"):
        await fetch(make(), *[f"http://pictures:{site.port}/image?{number}" for number in range(10_000)])
    assert not site.asked


async def test_one_key_leaves_room_for_others(make: Make, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_links, "_REQUEST_S", 0.3)
    fetcher, link = make(most_bytes=MIB), f"http://pictures:{site.port}/image"
    async with fetcher.fetching([link], 1), fetcher.fetching([link], 1):
        with pytest.raises(Overloaded):
            await fetch(fetcher, link, key=1)
        assert await fetch(fetcher, link, key=2) == [FILE]
    assert await fetch(fetcher, link, key=1) == [FILE]


def test_settings_that_name_no_host_or_network_are_faults() -> None:
    hosts = ("images.example", "minio:9000", "[::1]:80", "https://a", "A.example", "a/b", "*")
    found = faults(Settings(media_url_hosts=hosts, media_url_networks=("10.0.0.0/8", "10.0.0.1/8")))
    places = [one.path for one in found if one.path.startswith("media_url")]
    assert places == [*(f"media_url_hosts[{at}]" for at in range(3, 7)), "media_url_networks[1]"]


@pytest.mark.slow
async def test_a_link_has_the_vector_of_the_file_in_a_daemon_that_lists_its_host(site: Site, tmp_path: Path) -> None:
    model = await asyncio.to_thread(build_clip, tmp_path / "clip")
    listed: dict[str, Any] = {"media_url_hosts": [f"localhost:{site.port}"], "media_url_networks": HERE}

    def start() -> WarmDaemonProcess:
        daemon = WarmDaemonProcess(**listed).start()
        with daemon.client() as client:
            client.create("clip", str(model), dtype="float32")
            client.wait_until_running("clip", deadline_s=100)
        return daemon

    daemon = await asyncio.to_thread(start)
    try:
        async with aiohttp.ClientSession(daemon.api) as session:

            async def told(*links: str) -> tuple[int, Any]:
                body = {"model": "clip", "input": [{"image": one} for one in links]}
                async with session.post("/v1/embeddings", json=body) as reply:
                    return reply.status, await reply.json()

            link, uri = (
                f"http://localhost:{site.port}/image",
                "data:image/png;base64," + base64.b64encode(FILE).decode(),
            )
            status, answer = await told(link, uri)
            assert status == 200, answer
            assert answer["data"][0]["embedding"] == answer["data"][1]["embedding"]
            for wrong in ("http://example.com/image", f"http://localhost:{site.port}/nothing"):
                status, answer = await told(uri, wrong)
                assert (status, answer["error"]["message"][:20]) == (400, "`input.1`: the link ")
            for other in ("file:///etc/passwd", "ftp://localhost/image", "//example.com/image"):
                status, answer = await told(uri, other)
                assert status == 400
                assert "only links by http and https are fetched" in answer["error"]["message"]
    finally:
        await asyncio.to_thread(daemon.close)


async def test_no_more_pages_than_allowed_are_rendered_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()

    def page(data: bytes, number: int | None) -> bytes:
        begun.release()
        may_end.wait(20)
        return data

    monkeypatch.setattr(pdf_pages, "page", page)
    monkeypatch.setattr(media_links, "_RENDER_WAIT_S", 0.05)
    renderer = PageRenderer()
    try:
        calls = [asyncio.create_task(renderer.page(b"%d" % at, 1)) for at in range(2)]
        for _ in calls:
            assert await asyncio.to_thread(begun.acquire, timeout=20)
        calls[0].cancel()
        with suppress(asyncio.CancelledError):
            await calls[0]
        with pytest.raises(Overloaded, match=r"2 at a time: none had ended after 0\.05 s"):
            await renderer.page(b"3", 1)
        may_end.set()
        assert await calls[1] == b"1"
        monkeypatch.setattr(media_links, "_RENDER_WAIT_S", 20.0)
        assert await renderer.page(b"4", 1) == b"4"
    finally:
        may_end.set()
        renderer.close()


async def test_tenants_whose_pages_wait_are_served_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: queue.Queue[tuple[bytes, threading.Event]] = queue.Queue()

    def page(data: bytes, number: int | None) -> bytes:
        may_end = threading.Event()
        begun.put((data, may_end))
        may_end.wait(20)
        return data

    monkeypatch.setattr(pdf_pages, "page", page)
    renderer = PageRenderer()
    sent = [(b"first", 1), (b"second", 1), (b"third", 1), (b"fourth", 1), (b"of another", 2)]
    calls = []
    for data, tenant in sent:
        calls.append(asyncio.create_task(renderer.page(data, 1, tenant)))
        await asyncio.sleep(0)
    order = []
    try:
        for _ in sent:
            data, may_end = await asyncio.to_thread(begun.get, timeout=20)
            order.append(data)
            may_end.set()
        assert await asyncio.gather(*calls) == [data for data, _ in sent]
    finally:
        renderer.close()
    assert order.index(b"of another") < order.index(b"fourth")
