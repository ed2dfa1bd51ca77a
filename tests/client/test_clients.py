"""The blocking face: the same methods, no event loop in the caller."""

from __future__ import annotations

import asyncio
import signal
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from tests.support.small_servers import INSTANCE, Certificates, Daemon, serve, vector_of

from teimgr.client import AsyncClient, Client, Tls, http_replies
from teimgr.client.clients import LoopThread
from teimgr.client.rest_client import RestClient
from teimgr.errors import (
    DeadlineExceeded,
    EmptyInput,
    InstanceNotFound,
    Internal,
    InvalidConfig,
    Refused,
    TokenRateExceeded,
    Unavailable,
    Unreachable,
)


def test_both_faces_have_the_same_methods() -> None:
    asynchronous = {name for name in dir(AsyncClient) if not name.startswith("_")}
    blocking = {name for name in dir(Client) if not name.startswith("_")}
    assert blocking == asynchronous


async def test_calls_block_and_return_values(api_url: str, mux_url: str) -> None:
    def body() -> None:
        with Client(api_url, mux_url) as client:
            client.create("one", "org/model")
            assert client.wait_until_running("one", deadline_s=20).pid == 7
            np.testing.assert_array_equal(client.embed("a", instance=INSTANCE), [vector_of("a")])
            answer = client.embed_arrow(["a", "refuse"], instance=INSTANCE)
            assert list(answer.errors) == [1]
            with pytest.raises(InstanceNotFound):
                client.get("nope")

    await asyncio.to_thread(body)


async def test_streams_are_iterators(mux_url: str) -> None:
    def texts() -> Iterator[str]:
        for number in range(100):
            yield f"text {number}"

    def body() -> None:
        with Client(grpc=mux_url) as client:
            rows = list(client.embed_stream(texts(), instance=INSTANCE, window=8))
            np.testing.assert_array_equal(np.stack(rows), [vector_of(text) for text in texts()])
            answers = list(client.embed_arrow_stream([["a"], ["b", "c"]], instance=INSTANCE))
            assert [len(answer.vectors) for answer in answers] == [1, 2]

    await asyncio.to_thread(body)


async def test_a_download_is_an_iterator_of_events(api_url: str) -> None:
    def body() -> None:
        with Client(api_url) as client:
            assert [event.event for event in client.download_model("org/model")] == ["progress", "done"]
            stream = client.download_model("org/model")
            assert next(stream).event == "progress"
            stream.close()
            assert client.ready() is True

    await asyncio.to_thread(body)


async def test_a_stream_that_is_left_early_leaves_nothing_behind(mux_url: str) -> None:
    def body() -> None:
        with Client(grpc=mux_url) as client:
            stream = client.embed_stream((f"text {number}" for number in range(10_000)), instance=INSTANCE)
            np.testing.assert_array_equal(next(stream), vector_of("text 0"))
            stream.close()
            np.testing.assert_array_equal(client.embed("a", instance=INSTANCE), [vector_of("a")])

    await asyncio.to_thread(body)


async def test_a_failure_in_the_middle_of_a_stream_is_raised_by_the_iterator(mux_url: str) -> None:
    def body() -> None:
        with Client(grpc=mux_url) as client:
            stream = client.embed_stream(["a", "refuse"], instance=INSTANCE)
            next(stream)
            with pytest.raises(EmptyInput):
                next(stream)

    await asyncio.to_thread(body)


def test_closing_ends_the_thread_and_a_closed_client_says_so() -> None:
    before = set(threading.enumerate())  # a client that other tests share may be open in this process
    with Client() as client:
        client_threads = {thread for thread in threading.enumerate() if thread.name == "teimgr-client"} - before
        assert client_threads
    assert not client_threads & set(threading.enumerate())
    with pytest.raises(Internal, match="not open"):
        client.health()


@pytest.mark.parametrize("turn", range(8))
def test_calls_of_other_threads_end_when_the_client_is_closed(unused_port: int, turn: int) -> None:
    """One submitted to a loop that has stopped would never end."""
    client = Client(f"http://127.0.0.1:{unused_port}")
    client.__enter__()
    ended, begun = list[str](), threading.Barrier(7)

    def call_until_closed() -> None:
        begun.wait(10)
        while True:
            try:
                client.health()
            except Internal as error:
                ended.append(error.message)
                return
            except Unreachable:
                pass

    threads = [threading.Thread(target=call_until_closed, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    begun.wait(10)
    client.close()
    for thread in threads:
        thread.join(20)
    assert len(ended) == 6
    assert all("client" in message for message in ended)


async def test_a_stream_that_outlives_its_client_ends_without_an_error(mux_url: str) -> None:
    def body() -> None:
        with Client(grpc=mux_url) as client:
            stream = client.embed_stream((f"text {number}" for number in range(10_000)), instance=INSTANCE)
            next(stream)
        stream.close()

    await asyncio.to_thread(body)


def test_an_interrupted_call_has_ended_when_the_interrupt_is_raised() -> None:
    """What is cancelled takes some steps to end; a stream that still runs could not be closed."""
    main, steps = threading.get_ident(), []

    async def interrupted() -> None:
        try:
            signal.pthread_kill(main, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            for step in range(1000):
                await asyncio.sleep(0)
                steps.append(step)

    loop = LoopThread()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(interrupted())
        assert len(steps) == 1000
    finally:
        loop.close()


async def test_an_error_that_is_not_the_daemons_keeps_its_status_and_text(client: AsyncClient) -> None:
    with pytest.raises(Refused, match="HTTP 405"):
        await client._http.call("PUT", "/instances", timeout_s=5)


async def test_a_reply_that_never_comes_ends_at_the_timeout(api_url: str) -> None:
    async with AsyncClient(api_url, timeout_s=0.2) as client:
        with pytest.raises(DeadlineExceeded, match="no reply within"):
            await client.get("slow")


async def test_nobody_listening_is_unavailable(unused_port: int) -> None:
    async with AsyncClient(f"http://127.0.0.1:{unused_port}") as client:
        with pytest.raises(Unavailable):
            await client.health()


async def test_a_reply_that_is_no_json_is_an_internal_error(client: AsyncClient, daemon: Daemon) -> None:
    async def text(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    daemon.health = text  # type: ignore[method-assign]
    async with serve(daemon) as url, AsyncClient(url) as other:
        with pytest.raises(Internal, match="is not JSON"):
            await other.health()


async def test_a_refusal_has_the_time_to_wait_of_its_header(daemon: Daemon) -> None:
    async def refused(request: web.Request) -> web.Response:
        headers = {"X-Teimgr-Code": "TOKEN_RATE_EXCEEDED", "Retry-After": "7"}
        return web.json_response({"error": "quota", "error_type": "Overloaded"}, status=429, headers=headers)

    daemon.health = refused  # type: ignore[method-assign]
    async with serve(daemon) as url, AsyncClient(url, timeout_s=20) as client:
        for call in (client.health(), asyncio.to_thread(RestClient(url, timeout_s=20).health)):
            with pytest.raises(TokenRateExceeded) as caught:
                await call
            assert caught.value.retry_after_s == 7.0


async def test_a_reply_without_an_end_is_given_up(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=200 if request.method == "GET" else 503)
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                await response.write(bytes(2**16))
        return response

    monkeypatch.setattr(http_replies, "MAX_REPLY_BYTES", 2**20)
    daemon.health = daemon.download = endless  # type: ignore[method-assign]
    async with serve(daemon) as url, AsyncClient(url, timeout_s=20) as client:
        with pytest.raises(Internal, match="/health: the reply has more than 1048576 bytes"):
            await client.health()
        with pytest.raises(Internal, match="/health: the reply has more than 1048576 bytes"):
            await asyncio.to_thread(RestClient(url, timeout_s=20).health)
        with pytest.raises(Internal, match="/download: the reply has more than 1048576 bytes"):
            async for _ in client.download_model("org/any"):
                pass


async def test_rest_over_mtls(daemon: Daemon, certificates: Certificates) -> None:
    proof = Tls(ca=certificates.ca, cert=certificates.client_cert, key=certificates.client_key, server_name="localhost")
    async with serve(daemon, certificates.server_context()) as url:
        async with AsyncClient(url, tls=proof) as client:
            assert (await client.health()).status == "healthy"
        async with AsyncClient(url, tls=Tls(ca=certificates.ca, server_name="localhost")) as client:
            with pytest.raises(Unavailable):
                await client.health()
        async with AsyncClient(url) as client:
            with pytest.raises(Unavailable, match=r"(?i)certificate.verify.failed"):
                await client.health()


async def test_rest_over_a_unix_socket(daemon: Daemon, certificates: Certificates, tmp_path: Path) -> None:
    path = tmp_path / "api #1.sock"
    async with serve(daemon, path=path) as url, AsyncClient(url) as client:
        assert (await client.health()).status == "healthy"
    async with AsyncClient(f"unix:{path}") as client:
        with pytest.raises(Unreachable, match="Connection refused") as caught:
            await client.health()
        assert caught.value.address == f"unix:{path}"

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.server_cert, certificates.server_key)
    async with serve(daemon, context, path) as url:
        async with AsyncClient(url, tls=Tls(ca=certificates.ca)) as client:
            assert (await client.health()).status == "healthy"
        for tls in (Tls(), Tls(ca=certificates.ca, server_name="elsewhere")):
            async with AsyncClient(url, tls=tls) as client:
                with pytest.raises(Unavailable, match=r"(?i)certificate.verify.failed"):
                    await client.health()


async def test_a_missing_certificate_file_is_named() -> None:
    with pytest.raises(InvalidConfig, match=r"nowhere\.pem: No such file"):
        async with AsyncClient("https://localhost:1", tls=Tls(ca="nowhere.pem")):
            pass
