"""The steady caller of the benchmarks and of the fuzzing, at a real server over real sockets."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from bench.contest import Child, child
from bench.steady import OK, SteadyCall, SteadyTask

_RATE = 50.0


@contextmanager
def _serving(released: threading.Event) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            released.wait(30)
            self.send_response(404 if self.path == "/missing" else 200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def do_POST(self) -> None:
            assert self.rfile.read(int(self.headers["content-length"])) == b"body"
            assert self.headers["authorization"] == "Bearer key"
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            released.set()
            server.shutdown()
            thread.join()


def _calls(caller: Child, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += caller.ask("take")["calls"]
    return found


def _at(name: str, port: int, **how: Any) -> SteadyCall:
    return SteadyCall(name, "http", port, f"/{name}", rate=_RATE, **how)


def test_outcomes_are_named_and_connections_kept_or_not() -> None:
    released = threading.Event()
    released.set()
    body = base64.b64encode(b"body").decode()
    with _serving(released) as port:
        calls = [_at("found", port, body=body, key="key"), _at("missing", port), _at("new", port, fresh=True)]
        with child(SteadyTask(calls)) as caller:
            found = _calls(caller, 30)

    outcomes = {
        name: {outcome for other, _, _, outcome in found if other == name} for name in ("found", "missing", "new")
    }
    assert outcomes == {"found": {OK}, "missing": {"404"}, "new": {OK}}


def test_calls_begin_when_they_are_due_though_none_is_answered_and_their_latency_counts_from_there() -> None:
    released = threading.Event()
    with _serving(released) as port, child(SteadyTask([_at("found", port)])) as caller:
        while len(waiting := caller.ask("take")["waiting"]) < 5:
            pass
        released.set()
        found = _calls(caller, 5)

    first = min(due for _, due in waiting)
    latency_ms = {due: ms for _, due, ms, _ in found}
    assert latency_ms[first] >= 4 / _RATE * 1e3  # it waited while four others became due
    assert time.monotonic() > first


def test_a_port_that_nobody_serves_is_an_outcome() -> None:
    with child(SteadyTask([_at("found", 1)])) as caller:
        assert {outcome for _, _, _, outcome in _calls(caller, 3)} == {"ConnectionRefusedError"}
