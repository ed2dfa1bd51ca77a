"""The blocking face: the same methods, no event loop in the caller."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.small_servers import INSTANCE, vector_of

from teimgr.client import AsyncClient, Client
from teimgr.client.clients import LoopThread
from teimgr.errors import EmptyInput, InstanceNotFound


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
    with pytest.raises(RuntimeError, match="not open"):
        client.health()


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
