from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import h2.events
import h2.settings
import pytest
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.errors import TeimgrError
from teimgr.http import bodies
from teimgr.http.bodies import BoundedReplies, RequestTurns, UnreadOfPort
from teimgr.http.http2.requests import protocol
from teimgr.http.server import bind, serving
from tests.support.http_peers import LIMIT_S, Peer, connecting, request
from tests.support.polling import eventually

_MANY = 400


async def test_bodies_that_expire_together_are_answered_a_few_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.01)
    loop, turn, answered = asyncio.get_running_loop(), 0, Counter[int]()

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if answered.total() < _MANY:
            loop.call_soon(count_turns)

    async def nothing_comes() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def read() -> None:
        with pytest.raises(bodies.SlowClient):
            await bodies.read_limited(nothing_comes(), 100)
        answered[turn] += 1

    count_turns()
    await asyncio.gather(*(read() for _ in range(_MANY)))
    assert answered.total() == _MANY
    assert max(answered.values()) <= 16  # a turn's eight beside eight that had waited


PAGE = b"x" * 2**17
PAGES = 16
"""What the port may hold: half of it is of one address, a quarter of one connection."""
LARGE = b"x" * 2**25  # more than the buffers of a connection hold
CLOSED = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0}


async def routes(scope: Any, receive: Any, send: Any) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield PAGE

    if scope["type"] == "http":
        bodies = {"/page": PAGE, "/large": LARGE}
        body = bodies.get(scope["path"], b"ok")
        response = StreamingResponse(parts()) if scope["path"] == "/parts" else Response(body)
        await response(scope, receive, send)


@asynccontextmanager
async def served(pages: int = PAGES) -> AsyncIterator[tuple[int, UnreadOfPort]]:
    """A port, and its replies that are not read."""
    app = BoundedReplies(routes, lambda scope, error: Response(error.message, 429))
    sock = bind("127.0.0.1", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "UNREAD_BYTES", pages * len(PAGE))
        patch.setattr(bodies, "_WAIT_S", 0.1)
        async with serving(app, sock, protocol) as listener, asyncio.timeout(LIMIT_S):
            yield sock.getsockname()[1], listener._server.server_state.unread_replies


async def answers(peer: Peer, count: int) -> list[str]:
    """The statuses of `count` requests, once all are answered."""
    while len(found := [each for each in peer.events if isinstance(each, h2.events.ResponseReceived)]) < count:
        await peer.take()
    return [dict(each.headers)[":status"] for each in found]  # type: ignore[arg-type, index]


async def flooding(peer: Peer, path: str, count: int, method: str = "GET") -> list[str]:
    peer.h2.update_settings(CLOSED)
    for _ in range(count):
        peer.open(request(path, method), end=True)
    return await answers(peer, count)


@pytest.mark.parametrize("path", ["/page", "/parts"])
async def test_pages_on_closed_windows_are_refused_beyond_the_part_of_a_connection(path: str) -> None:
    async with served() as (port, unread), connecting("127.0.0.1", port) as connect:
        peer, other = await connect(), await connect()
        statuses = await flooding(peer, path, 3 * PAGES)
        held = unread.taken_bytes
        assert (await other.ask(request("/page")))[2] == PAGE  # another connection has room
        peer.writer.transport.abort()
        await eventually(lambda: unread.taken_bytes == 0)

    assert set(statuses) == {"200", "429"}
    assert len(PAGE) <= held <= (PAGES // 4 + 1) * len(PAGE)


async def test_connections_of_one_address_have_a_part_and_small_replies_go_on() -> None:
    async with served() as (port, unread), connecting("127.0.0.1", port) as connect:
        peers = [await connect() for _ in range(8)]
        statuses = [await flooding(peer, "/page", 8) for peer in peers]
        assert unread.taken_bytes <= (PAGES // 2 + 1) * len(PAGE)
        assert statuses[-1] == ["429"] * 8
        fresh = await connect()
        assert (await fresh.ask(request("/health")))[2] == b"ok"
        assert (await fresh.ask(request("/page")))[0] == 429
        for peer in peers:
            peer.writer.transport.abort()
        await eventually(lambda: unread.taken_bytes == 0)
        assert (await fresh.ask(request("/page")))[2] == PAGE


async def test_who_has_changed_something_gets_the_reply_and_begins_nothing_more_until_it_is_read() -> None:
    async with served() as (port, unread), connecting("127.0.0.1", port) as connect:
        statuses = await flooding(await connect(), "/page", PAGES, "POST")
        assert statuses.count("200") == PAGES // 4 + 1
        assert statuses.count("429") == PAGES - PAGES // 4 - 1
        assert unread.taken_bytes == (PAGES // 4 + 1) * len(PAGE)


async def test_over_http1_what_waits_in_the_buffers_of_connections_counts() -> None:
    get = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
    async with served(pages=2 * len(LARGE) // len(PAGE)) as (port, unread):
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in slow[:2]:
            least = unread.taken_bytes + len(LARGE) // 2
            writer.write(get % b"/large")
            await eventually(lambda least=least: unread.taken_bytes > least)
        reader, writer = slow[2]
        writer.write(get % b"/large")
        assert b" 429 " in await reader.readline()
        for _, each in slow[:2]:
            each.transport.abort()
        await eventually(lambda: unread.taken_bytes == 0)
        with suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()


_REQUESTS = 200


class _App:
    """Notes the caller of each request, and the turn of the loop in which it began."""

    def __init__(self) -> None:
        self.turn = 0
        self.begun: list[tuple[str, int]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.append((scope["client"][0], self.turn))

    def count_turns(self) -> None:
        self.turn += 1
        if len(self.begun) < _REQUESTS:
            asyncio.get_running_loop().call_soon(self.count_turns)


class _Refusals:
    """Counts what is refused."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, scope: Scope, error: TeimgrError) -> ASGIApp:
        self.count += 1

        async def answer(scope: Scope, receive: Receive, send: Send) -> None: ...

        return answer


def _request(app: RequestTurns, address: str, key: str | None = None) -> asyncio.Task[None]:
    async def receive() -> Message:
        raise AssertionError("nothing is received")

    async def send(message: Message) -> None: ...

    headers = [(b"authorization", key.encode())] if key else []
    scope: dict[str, Any] = {"type": "http", "headers": headers, "client": (address, 1)}
    return asyncio.create_task(app(scope, receive, send))


async def test_a_few_requests_begin_in_each_turn_of_the_loop() -> None:
    inner = _App()
    app = RequestTurns(inner, _Refusals())
    inner.count_turns()
    await asyncio.gather(*(_request(app, "many") for _ in range(_REQUESTS)))
    assert len(inner.begun) == _REQUESTS
    assert max(Counter(turn for _, turn in inner.begun).values()) <= 8  # a turn's four beside four that had waited


async def test_who_asks_little_does_not_wait_for_who_asks_much() -> None:
    inner = _App()
    app = RequestTurns(inner, _Refusals())
    many = [_request(app, "many", f"Bearer {number}") for number in range(_REQUESTS)]  # that nobody has checked
    await asyncio.sleep(0)  # all of them have come
    few = [_request(app, "few")]
    await asyncio.gather(*few)
    assert len(inner.begun) < 20
    await asyncio.gather(*many)
    assert len(inner.begun) == _REQUESTS + 1


async def test_clients_that_have_gone_leave_their_turn() -> None:
    inner = _App()
    app = RequestTurns(inner, _Refusals())
    gone = [_request(app, "gone") for _ in range(_REQUESTS)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.wait(gone)
    await _request(app, "few")
    assert ("few", 0) in inner.begun
    assert len(inner.begun) <= 5


async def test_what_a_caller_has_waiting_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_MAX_WAITING", 10)
    inner, refusals = _App(), _Refusals()
    app = RequestTurns(inner, refusals)
    many = [_request(app, "many", f"Bearer {number}") for number in range(_REQUESTS)]
    few = [_request(app, "few") for _ in range(10)]
    await asyncio.gather(*many, *few)
    assert refusals.count >= _REQUESTS - 2 * 10
    assert Counter(caller for caller, _ in inner.begun)["few"] == 10
