"""Media of requests: fetches links from the hosts of `media_url_hosts` within limits, and renders PDF pages.

At each hop, all addresses of the host are looked up once and checked, and the connection uses one of them. The error is
the same for an unknown name, a closed port and a forbidden address, so that links cannot explore a network; the log has
the reason.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from teimgr.engine.batching.fair_share import TenantTurns
from teimgr.engine.job import Share
from teimgr.errors import InvalidInput, Overloaded
from teimgr.http.byte_budget import ByteBudget, Shares
from teimgr.wire import pdf_pages

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 20 * 2**20
LINK_S = 5.0
_REQUEST_S = 30.0  # for all links of a request
_AT_ONCE = 4  # concurrent fetches per request
_MAX_REDIRECTS = 3
_MAX_LINKS = 256  # per request
_MAX_CHARACTERS = 4096  # per link
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"accept": "image/*, audio/*, application/pdf", "accept-encoding": "identity"}
_UNICAST_6 = ipaddress.IPv6Network("2000::/3")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Lookup = Callable[[str, int], Sequence[str]]


class _NotFetchedError(Exception):
    """The reason, for the log, why a link could not be fetched."""


class _Checked(AbstractResolver):
    """Resolves to the checked addresses, without a lookup."""

    def __init__(self, addresses: Iterable[Address], port: int) -> None:
        self._found = [
            ResolveResult(
                hostname=str(one),
                host=str(one),
                port=port,
                family=socket.AF_INET if one.version == 4 else socket.AF_INET6,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for one in addresses
        ]

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return self._found

    async def close(self) -> None:
        """No-op: nothing is open."""


class LinkFetcher:
    """Fetches files for the requests of one worker. For the loop's thread.

    `hosts` are the allowed hosts, with the given port or that of the scheme; `networks` are allowed in addition to
    public addresses. The files of one request have at most `most_bytes`, concurrent fetches at most twice that per API
    key and four times that in total. Requests wait for room.
    """

    def __init__(
        self, hosts: Iterable[str], networks: Iterable[str], most_bytes: int, lookup: Lookup | None = None
    ) -> None:
        named = [URL.build(authority=one) for one in hosts]
        self._hosts = {(one.raw_host, one.explicit_port) for one in named}
        self._networks = [ipaddress.ip_network(one) for one in networks]
        self._most_bytes = most_bytes
        self._shares = Shares(ByteBudget(4 * most_bytes), 2)
        self._lookup = lookup or _look_up
        self._names = ThreadPoolExecutor(_AT_ONCE, "names")

    def close(self) -> None:
        self._names.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def fetching(self, links: Iterable[str], key: int) -> AsyncIterator[Mapping[str, asyncio.Task[bytes]]]:
        """Fetch the files of links for the caller with this number of API key; the tasks run inside the context.

        Raises:
            InvalidInput: there are more than 256. Overloaded: no room became free. A task raises InvalidInput: the host
            is not listed, or the fetch failed.
        """
        wanted = dict.fromkeys(links)
        if len(wanted) > _MAX_LINKS:
            raise InvalidInput(
                f"Input validation error: the request has {len(wanted):,} links, and {_MAX_LINKS} are allowed: send it "
                "in parts, or the files themselves"
            )
        size = min(len(wanted) * MAX_FILE_BYTES, self._most_bytes)
        charge, tasks = self._shares.charge(key), dict[str, asyncio.Task[bytes]]()
        try:
            await charge.take(size, _REQUEST_S)
            request = _Request(size)
            tasks = {link: asyncio.create_task(self._fetch(link, request)) for link in wanted}
            yield tasks
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            charge.release()

    async def _fetch(self, link: str, request: _Request) -> bytes:
        url = self._parsed(link)
        try:
            async with request.turns, asyncio.timeout_at(min(request.end, _now() + LINK_S)):
                return await self._follow(url, request)
        except (_NotFetchedError, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            log.info("a link was not fetched", extra={"host": url.host, "reason": f"{type(error).__name__}: {error}"})
            raise InvalidInput(
                f"Input validation error: the link cannot be fetched: no file of at most {MAX_FILE_BYTES:,} bytes came "
                f"from {url.host} within {LINK_S:g} s: send the file itself, as a data URI or as base64"
            ) from error

    def _parsed(self, link: str) -> URL:
        """Parse a link; raises InvalidInput if its host is not listed."""
        with suppress(ValueError):
            if len(link) <= _MAX_CHARACTERS and self._is_listed(url := URL(link.strip())):
                return url
        raise InvalidInput(
            f"Input validation error: the link ({link[:64]!r}) is not to one of the hosts that may be linked to "
            "(media_url_hosts): send the file itself, as a data URI or as base64"
        )

    def _is_listed(self, url: URL) -> bool:
        if url.scheme not in ("http", "https") or url.raw_user is not None or url.raw_password is not None:
            return False
        is_default = url.is_default_port() and (url.raw_host, None) in self._hosts
        return is_default or (url.raw_host, url.port) in self._hosts

    async def _follow(self, url: URL, request: _Request) -> bytes:
        for _ in range(1 + _MAX_REDIRECTS):
            if not self._is_listed(url):
                raise _NotFetchedError(f"a redirect to {url.host}, which is not listed")
            connector = aiohttp.TCPConnector(
                resolver=_Checked(await self._addresses(url), url.port or 0), use_dns_cache=False, force_close=True
            )
            async with (
                aiohttp.ClientSession(
                    connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False
                ) as session,
                session.get(url, allow_redirects=False, headers=_HEADERS) as reply,
            ):
                if reply.status not in _REDIRECTS:
                    return await _body(reply, request)
                url = url.join(URL(reply.headers.get("location", "")))
        raise _NotFetchedError(f"more than {_MAX_REDIRECTS} redirects")

    async def _addresses(self, url: URL) -> list[Address]:
        """Return all addresses of a host; raises _NotFetchedError if one of them is not allowed."""
        assert url.raw_host is not None
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._names, self._lookup, url.raw_host, url.port or 0)
        addresses = [ipaddress.ip_address(one) for one in found]
        for one in addresses:
            if not _is_public(one) and not any(one in network for network in self._networks):
                raise _NotFetchedError(f"the address {one} is neither public nor in media_url_networks")
        return addresses


class _Request:
    """State shared by all links of a request: remaining bytes, time, connections."""

    def __init__(self, left: int) -> None:
        self._left = left
        self.end = _now() + _REQUEST_S
        self.turns = asyncio.Semaphore(_AT_ONCE)

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise _NotFetchedError("the links of the request exceed its limit of bytes")


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _body(reply: aiohttp.ClientResponse, request: _Request) -> bytes:
    if reply.status != 200:
        raise _NotFetchedError(f"status {reply.status}")
    if (coding := reply.headers.get("content-encoding", "identity")) != "identity":
        raise _NotFetchedError(f"the reply is compressed: {coding[:32]}")
    if (reply.content_length or 0) > MAX_FILE_BYTES:
        raise _NotFetchedError("the file is too large")
    found = bytearray()
    async for part in reply.content.iter_any():
        request.take(len(part))
        found += part
        if len(found) > MAX_FILE_BYTES:
            raise _NotFetchedError("the file is too large")
    return bytes(found)


def _look_up(host: str, port: int) -> list[str]:
    return [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def _is_public(address: Address) -> bool:
    """True for a public internet address that does not embed another kind of address, as 6to4 does."""
    if isinstance(address, ipaddress.IPv6Address) and (
        address not in _UNICAST_6 or address.sixtofour is not None or address.teredo is not None
    ):
        return False
    return address.is_global and not address.is_multicast


_RENDERED_AT_ONCE = 2  # per worker; each is a process that reads untrusted data
_RENDER_WAIT_S = 30.0


class _Waiting(NamedTuple):
    share: Share
    turn: asyncio.Future[None]


class PageRenderer:
    """Renders pages for the requests of one worker. For the loop's thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_RENDERED_AT_ONCE, "pdf")
        self._free = _RENDERED_AT_ONCE
        self._waiting = TenantTurns[_Waiting]()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def page(self, data: bytes, number: int | None, tenant: int = 0) -> bytes:
        """Return the PNG file of a page, as `pdf_pages.page`. Tenants with waiting pages take turns.

        Raises:
            InvalidInput: as there. Overloaded: other pages take so long that its turn did not come.
        """
        try:
            async with asyncio.timeout(_RENDER_WAIT_S):
                await self._turn(tenant)
        except TimeoutError:
            raise Overloaded(
                f"PDF documents of other requests are being rendered, {_RENDERED_AT_ONCE} at a time: none had ended "
                f"after {_RENDER_WAIT_S:g} s"
            ) from None
        done = self._threads.submit(pdf_pages.page, data, number)
        loop = asyncio.get_running_loop()
        # Also runs if the caller has left: the renderer finishes its page.
        done.add_done_callback(lambda _: loop.call_soon_threadsafe(self._give_turn))
        return await asyncio.wrap_future(done)

    async def _turn(self, tenant: int) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(Share(tenant), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # cancelled in the loop pass in which it got the turn
                self._give_turn()
            raise

    def _give_turn(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft().turn
            if not turn.done():  # its caller has not left
                turn.set_result(None)
                return
        self._free += 1
