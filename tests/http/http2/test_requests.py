"""HTTP requests over HTTP/2: direct answers and ASGI, streams in both directions, clients that leave, budgets."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import h2.events
import h2.settings
import pytest
from h2.errors import ErrorCodes
from starlette.requests import Request
from starlette.responses import Response
from tests.support.http_peers import LIMIT_S, Peer, connecting, request
from tests.support.polling import eventually

from teimgr.http.bodies import read_body, room_for_reply
from teimgr.http.byte_budget import ByteBudget, Charge
from teimgr.http.direct import PART_BYTES, Answer, DirectReply, DirectRequest
from teimgr.http.http2 import connection
from teimgr.http.http2 import stream as http2_stream
from teimgr.http.http2.requests import protocol
from teimgr.http.server import Listener, bind, serving

LARGE = 1 << 20


@dataclass
class Application:
    """An ASGI application with a path for each behaviour, and what answers `/direct` and `/upload` without it."""

    budget: ByteBudget = field(default_factory=lambda: ByteBudget(8 * LARGE))
    scopes: list[dict[str, Any]] = field(default_factory=list)
    direct_requests: list[DirectRequest] = field(default_factory=list)
    direct_bodies: list[bytes] = field(default_factory=list)
    is_left: asyncio.Event = field(default_factory=asyncio.Event)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.scopes.append(scope)
        match scope["path"]:
            case "/raises":
                raise RuntimeError("a defect")
            case "/breaks":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                raise RuntimeError("a defect")
            case "/page":
                await Response(b"x" * LARGE)(scope, receive, send)
            case "/events":
                await send({"type": "http.response.start", "status": 200, "headers": [(b"Connection", b"close")]})
                await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
                await self.goes_on.wait()
                await send({"type": "http.response.body", "body": b"data: 2\n\n", "more_body": True})
                while (await receive())["type"] != "http.disconnect":
                    pass
                self.is_left.set()
            case "/refuses":
                await Response(b"no", 401)(scope, receive, send)
            case _:
                told = b"%d" % len(await Request(scope, receive).body())
                await Response(told)(scope, receive, send)

    def direct(self, method: bytes, target: bytes) -> Answer | None:
        return {b"/direct": self.answer, b"/upload": self.upload}.get(target)

    async def upload(self, request: DirectRequest) -> DirectReply:
        charge = Charge(self.budget)
        try:
            body = await read_body(request, 4 * LARGE, charge)
            return DirectReply(200, {}, b"%d" % len(body) if body is not None else b"too large")
        finally:
            charge.release()

    async def answer(self, request: DirectRequest) -> DirectReply:
        self.direct_requests.append(request)
        body = bytearray()
        try:
            await room_for_reply(request.scope)
            while part := await request.body.read_some():
                body += part
            if body == b"hang":
                await asyncio.sleep(LIMIT_S)
        except asyncio.CancelledError:
            self.is_left.set()
            raise
        self.direct_bodies.append(bytes(body))
        if body == b"raise":
            raise RuntimeError("a defect")
        told = b"x" * LARGE if body == b"large" else bytes(body)
        return DirectReply(200, {"Content-Type": "text/plain"}, told, self.budget)


@dataclass
class Served:
    application: Application
    peer: Peer
    listener: Listener
    port: int


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    application, sock = Application(), bind("127.0.0.1", 0)
    async with serving(application, sock, protocol, application.direct) as listener:
        address = sock.getsockname()
        async with connecting(*address) as connect:
            yield Served(application, await connect(), listener, address[1])


async def test_a_small_post_is_answered_directly() -> None:
    async with served() as there:
        status, head, body = await there.peer.ask(request("/direct", "POST", **{"x-a": "1"}), b"hello")

    assert (status, body) == (200, b"hello")
    assert {name for name in head if name != "date"} == {":status", "content-type", "content-length"}
    (given,) = there.application.direct_requests
    assert (given.headers[b"host"], given.headers[b"x-a"]) == (b"x", b"1")
    assert given.scope["http_version"] == "2"
    assert there.application.scopes == []


@pytest.mark.parametrize("more", [{}, {"content-length": "6"}])
async def test_a_body_in_parts_is_answered_directly(more: dict[str, str]) -> None:
    async with served() as there:
        stream = there.peer.open(request("/direct", "POST", **more))
        await there.peer.settled()
        there.peer.h2.send_data(stream, b"abc")
        await there.peer.settled()
        there.peer.h2.send_data(stream, b"def", end_stream=True)
        there.peer.flush()

        assert (await there.peer.response(stream))[2] == b"abcdef"
    assert len(there.application.direct_requests) == 1


@pytest.mark.parametrize("size", [0, 60_000])
async def test_what_is_not_answered_directly_goes_to_the_application(size: int) -> None:
    async with served() as there:
        status, _, told = await there.peer.ask(request("/other?q=1", "POST"), b"x" * size)

    assert (status, told) == (200, b"%d" % size)
    (scope,) = there.application.scopes
    assert (scope["path"], scope["query_string"], scope["method"]) == ("/other", b"q=1", "POST")
    assert (scope["http_version"], scope["scheme"], scope["client"][0]) == ("2", "http", "127.0.0.1")
    assert scope["headers"][0] == (b"host", b"x")


@pytest.mark.parametrize("content", [b"abc", b"abcdefg"])
@pytest.mark.parametrize("target", ["/direct", "/other"])
@pytest.mark.parametrize("is_at_once", [True, False])
async def test_content_of_another_length_than_the_head_says_is_refused(
    content: bytes, target: str, is_at_once: bool
) -> None:
    async with served() as there:
        stream = there.peer.h2.get_next_available_stream_id()
        there.peer.h2.send_headers(stream, request(target, "POST", **{"content-length": "6"}))
        if not is_at_once:
            there.peer.flush()
            await eventually(lambda: there.application.scopes or there.application.direct_requests)
        there.peer.h2.send_data(stream, content, end_stream=True)
        there.peer.flush()

        reset = await there.peer.until(h2.events.StreamReset)

        assert (reset.stream_id, reset.error_code) == (stream, ErrorCodes.PROTOCOL_ERROR)
        assert (await there.peer.ask(request("/direct", "POST", **{"content-length": "5"}), b"hello"))[2] == b"hello"
        assert there.application.direct_bodies == [b"hello"]


async def test_a_large_body_is_charged_as_it_comes_and_flow_control_holds_it_back() -> None:
    async with served() as there:
        blocker = Charge(there.application.budget)
        blocker.add(8 * LARGE)
        stream = there.peer.open(request("/upload", "POST"))
        data = b"x" * (2 * LARGE)
        sent = there.peer.send(stream, data)
        for _ in range(5):
            await there.peer.settled()
            sent += there.peer.send(stream, data[sent:])
        assert sent < LARGE  # the windows, as nothing is charged
        blocker.release()
        while sent < len(data):
            await there.peer.take()
            sent += there.peer.send(stream, data[sent:])
        there.peer.h2.end_stream(stream)
        there.peer.flush()

        assert (await there.peer.response(stream))[2] == b"%d" % len(data)
        assert there.application.budget.taken_bytes == 0


async def test_a_long_direct_answer_is_charged_to_its_budget_until_it_is_read() -> None:
    async with served() as there:
        stream = there.peer.open(request("/direct", "POST"))
        there.peer.h2.send_data(stream, b"large", end_stream=True)
        there.peer.flush()
        await there.peer.until(h2.events.DataReceived)
        assert there.application.budget.taken_bytes == LARGE - PART_BYTES
        read = await there.peer.response(stream)

        assert len(read[2]) == LARGE
        await eventually(lambda: there.application.budget.taken_bytes == 0)


async def test_direct_answers_that_are_not_read_are_bounded() -> None:
    async with served() as there:
        unread = there.listener._server.server_state.unread_replies
        unread.limit_bytes = 4 * PART_BYTES  # of which one connection has a quarter
        for _ in range(3):
            stream = there.peer.open(request("/direct", "POST"))
            there.peer.h2.send_data(stream, b"large", end_stream=True)
            there.peer.flush()
            await there.peer.settled()

        assert len(there.application.direct_requests) == 3
        assert there.application.direct_bodies == [b"large"] * 2  # the third one waits
        assert unread.taken_bytes == 2 * PART_BYTES
        there.peer.writer.close()
        await eventually(lambda: unread.taken_bytes == there.application.budget.taken_bytes == 0)


async def test_a_direct_answer_that_is_not_read_ends_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_stream, "STALL_S", 0.1)
    async with served() as there:
        stream = there.peer.open(request("/direct", "POST"))
        there.peer.h2.send_data(stream, b"large", end_stream=True)
        there.peer.flush()
        reset = await there.peer.until(h2.events.StreamReset)

        assert reset.error_code == ErrorCodes.CANCEL
        await eventually(lambda: there.listener._server.server_state.unread_replies.taken_bytes == 0)


async def test_events_are_streamed_until_the_client_leaves() -> None:
    async with served() as there:
        stream = there.peer.open(request("/events"), end=True)
        first = await there.peer.until(h2.events.DataReceived)
        head = next(event for event in there.peer.events if isinstance(event, h2.events.ResponseReceived)).headers
        there.peer.events.clear()
        there.application.goes_on.set()
        second = await there.peer.until(h2.events.DataReceived)
        there.peer.h2.reset_stream(stream, ErrorCodes.CANCEL)
        there.peer.flush()
        async with asyncio.timeout(LIMIT_S):
            await there.application.is_left.wait()

    assert (first.data, second.data) == (b"data: 1\n\n", b"data: 2\n\n")
    assert "connection" not in dict(head)


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("is_whole", [True, False])
async def test_the_direct_answering_of_a_client_that_left_is_cancelled(how: str, is_whole: bool) -> None:
    async with served() as there:
        stream = there.peer.open(request("/direct", "POST"))
        there.peer.h2.send_data(stream, b"hang", end_stream=is_whole)
        there.peer.flush()
        await there.peer.settled()
        if how == "reset":
            there.peer.h2.reset_stream(stream)
            there.peer.flush()
        else:
            there.peer.writer.close()
        async with asyncio.timeout(LIMIT_S):
            await there.application.is_left.wait()


@pytest.mark.parametrize(("path", "body"), [("/raises", b""), ("/direct", b"raise")])
async def test_a_defect_is_an_answer_500_and_the_connection_goes_on(path: str, body: bytes) -> None:
    async with served() as there:
        assert (await there.peer.ask(request(path, "POST"), body))[0] == 500
        assert (await there.peer.ask(request("/direct", "POST"), b"a"))[0] == 200


async def test_a_defect_within_a_response_resets_its_stream_alone() -> None:
    async with served() as there:
        there.peer.open(request("/breaks"), end=True)
        reset = await there.peer.until(h2.events.StreamReset)

        assert reset.error_code == ErrorCodes.INTERNAL_ERROR
        assert (await there.peer.ask(request("/direct", "POST"), b"a"))[0] == 200


async def test_a_malformed_head_is_an_answer_400_and_the_connection_goes_on() -> None:
    async with served() as there:
        config = there.peer.h2.config
        config.validate_outbound_headers = config.normalize_outbound_headers = False
        status, _, text = await there.peer.ask([*request("/a"), ("connection", "close")])

        assert (status, text.startswith(b"Invalid HTTP request received: 'connection'")) == (400, True)
        assert (await there.peer.ask(request("/direct", "POST"), b"a"))[0] == 200


@pytest.mark.parametrize("bound", ["_DISCARD_S", "_DISCARDED_BYTES"])
async def test_a_client_that_still_sends_when_it_is_answered_is_stopped_in_the_end(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, bound, 0.05 if bound == "_DISCARD_S" else LARGE)
    async with served() as there:
        stream = there.peer.open(request("/refuses", "POST"))
        assert (await there.peer.response(stream))[0] == 401
        async with asyncio.timeout(LIMIT_S):
            while not (resets := [one for one in there.peer.events if isinstance(one, h2.events.StreamReset)]):
                if bound == "_DISCARDED_BYTES":
                    there.peer.send(stream, b"x" * LARGE)  # as much as the window allows
                await there.peer.take()

        assert (resets[0].stream_id, resets[0].error_code) == (stream, ErrorCodes.NO_ERROR)
        assert (await there.peer.ask(request("/direct", "POST"), b"a"))[0] == 200


async def test_head_has_no_body_and_the_length_of_get() -> None:
    async with served() as there:
        status, head, body = await there.peer.ask(request("/page", "HEAD"))

    assert (status, head["content-length"], body) == (200, str(LARGE), b"")


@pytest.mark.parametrize("target", ["/upload", "/other"])
async def test_a_client_that_awaits_100_continue_gets_it(target: str) -> None:
    async with served() as there:
        stream = there.peer.open(request(target, "POST", **{"expect": "100-continue", "content-length": "2"}))
        told = await there.peer.until(h2.events.InformationalResponseReceived)
        there.peer.h2.send_data(stream, b"{}", end_stream=True)
        there.peer.flush()

        assert dict(told.headers)[":status"] == "100"
        assert (await there.peer.response(stream))[2] == b"2"


async def test_http1_is_served_beside_it() -> None:
    async with served() as there:
        reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
        writer.write(b"POST /direct HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi")
        answered = await reader.read()
        writer.close()

    assert answered.startswith(b"HTTP/1.1 200")
    assert answered.endswith(b"hi")


CURL = shutil.which("curl")
HAS_HTTP2 = CURL is not None and b"HTTP2" in subprocess.run([CURL, "--version"], capture_output=True, check=True).stdout


@pytest.mark.skipif(not HAS_HTTP2, reason="curl is missing or has no HTTP/2")
async def test_curl_speaks_it_with_prior_knowledge() -> None:
    async with served() as there:
        there.application.goes_on.set()
        url = f"http://127.0.0.1:{there.port}"
        for path, more, expected in (
            ("/direct", ["-d", "hello"], "hello"),
            ("/upload", ["--data-binary", "@-"], str(3 * LARGE)),
            ("/upload", ["--data-binary", "@-", "-H", "expect: 100-continue"], str(3 * LARGE)),
            ("/refuses", ["--data-binary", "@-"], "no"),  # while it sends
            ("/page", [], "x" * LARGE),
        ):
            command = [str(CURL), "-sS", "--http2-prior-knowledge", "-w", "\n%{http_version}", *more, url + path]
            asked = await asyncio.create_subprocess_exec(
                *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            async with asyncio.timeout(LIMIT_S):
                output, _ = await asked.communicate(b"y" * (3 * LARGE) if "@-" in more else None)
            assert output.decode() == f"{expected}\n2", path
