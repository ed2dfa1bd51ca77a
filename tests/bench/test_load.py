"""The load generator of the benchmarks, at real servers over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler

import pytest
from bench.load import LoadFailed, LoadTask, run_load

_SLOW, _FAST = b'{"input": "slow"}', b'{"input": "fast"}'


@contextmanager
def _serving(handler: type[BaseRequestHandler]) -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[[type[BaseRequestHandler]], LoadTask]]:
    with ExitStack() as stack:
        yield lambda handler: LoadTask("http", stack.enter_context(_serving(handler)), "/embed")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["content-length"]))

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_an_idle_connection_that_the_server_closes_is_no_failure(
    serve: Callable[[type[BaseRequestHandler]], LoadTask],
) -> None:
    closed = threading.Event()

    class OneIsSlow(_Handler):
        def do_POST(self) -> None:
            body = self.body()
            if body == _SLOW:
                assert closed.wait(30)
            self.answer(body)
            self.close_connection = body == _FAST

        def finish(self) -> None:
            super().finish()
            self.connection.close()
            closed.set()

    found = run_load(serve(OneIsSlow), [_SLOW, _FAST], callers=2, seconds=0.0, whole=True)

    assert found["calls"] == found["all_calls"] == 2


def test_a_connection_closed_under_a_call_is_a_failure(
    serve: Callable[[type[BaseRequestHandler]], LoadTask],
) -> None:
    class Closing(_Handler):
        def do_POST(self) -> None:
            self.body()  # what is left unread would reset the connection
            self.close_connection = True

    with pytest.raises(LoadFailed, match=r"unexpected reply: b''$"):
        run_load(serve(Closing), [_FAST], callers=1, seconds=0.1, whole=True)


def test_a_reply_that_is_no_success_is_a_failure(serve: Callable[[type[BaseRequestHandler]], LoadTask]) -> None:
    class Refusing(_Handler):
        def do_POST(self) -> None:
            self.body()
            self.send_error(429)

    with pytest.raises(LoadFailed, match="429"):
        run_load(serve(Refusing), [_FAST], callers=1, seconds=0.1, whole=True)
