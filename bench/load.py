"""`python -m bench.load TASK`: a load generator in a process of its own, with commands as lines of JSON.

    {"requests": FILE}                            load the bodies, a JSON list of base64 texts
    {"run": {"callers": n, "seconds": s}}         n callers, each with one call under way, for s seconds
                                                  → {"calls", "all_calls" with those of the warm-up,
                                                     "p50_ms", "p99_ms", "max_ms", "seconds", "cpu_seconds"}
    with "whole": true                            no warm-up; what was called in that time is awaited and counts

The first line it writes, when it runs, is {}; a failure is {"error": text}.
It speaks just enough HTTP/1.1, and HTTP/2 for gRPC, over blocking sockets and one epoll: some 10 µs per call, so that
it measures the server. Every reply must be a success. TASK has the fields of `LoadTask`.
"""

from __future__ import annotations

import base64
import json
import re
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import numpy as np

_WARM_S = 0.5
_SILENCE_S = 30.0
_RECEIVE_BYTES = 2**20


@dataclass(frozen=True)
class LoadTask:
    """Where calls go: `kind` is http or grpc, `path` an HTTP route or the path of an RPC, `unix` a Unix socket to
    connect to in place of the port, `key` an API key that each call has."""

    kind: str
    port: int
    path: str
    unix: str = ""
    key: str = ""


class LoadFailed(RuntimeError):
    """A reply that is no success, or none at all."""


class Connection(Protocol):
    """One connection with a fixed number of callers."""

    sock: socket.socket

    def start(self) -> None:
        """Send the first call of every caller."""

    def received(self, on_reply: Callable[[float, float], None]) -> bool:
        """Read what has come; `on_reply` gets begin and end of each complete call; the caller's next one is sent.

        False where the server closed the connection while no call was under way, as it may after some idle seconds.
        """


class HttpConnection:
    """One caller over HTTP/1.1 with keep-alive."""

    _LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)

    def __init__(self, task: LoadTask, bodies: Iterator[bytes], callers: int) -> None:
        assert callers == 1
        self.sock = _connected(task)
        self._head = (
            f"POST {task.path} HTTP/1.1\r\nhost: 127.0.0.1:{task.port}\r\naccept: */*\r\n"
            "user-agent: bench\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            + (f"authorization: Bearer {task.key}\r\n" if task.key else "")
            + "\r\n"
        ).encode()
        self._bodies = bodies
        self._parts: list[bytes] = []
        self._missing = 0
        self._began: float | None = None

    def start(self) -> None:
        """Send one call, where there is one left."""
        body = next(self._bodies, None)
        if body is None:
            return
        self._began = time.perf_counter()
        self.sock.sendall(self._head % len(body) + body)

    def received(self, on_reply: Callable[[float, float], None]) -> bool:
        """Read a part of the reply, or its end."""
        data = self.sock.recv(_RECEIVE_BYTES)
        if self._began is None:
            if data:
                raise LoadFailed(f"a reply to no call: {data[:300]!r}")
            return False
        if not self._missing:
            data = b"".join((*self._parts, data))
            self._parts.clear()
            head = data.find(b"\r\n\r\n")
            if head < 0 and data:
                self._parts.append(data)
                return True
            length = self._LENGTH.search(data, 0, head + 2)
            if not data.startswith(b"HTTP/1.1 200 ") or length is None:
                raise LoadFailed(f"an unexpected reply: {data[:300]!r}")
            self._missing = int(length[1]) - (len(data) - head - 4)
        else:
            self._missing -= len(data)
        if not data:
            raise LoadFailed("the server closed a connection")
        if self._missing == 0:
            began, self._began = self._began, None
            on_reply(began, time.perf_counter())
            self.start()
        return True


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_WINDOW = 2**30
_HEAD = struct.Struct(">BHBBI")


class GrpcConnection:
    """Some callers of a unary RPC over one HTTP/2 connection."""

    def __init__(self, task: LoadTask, bodies: Iterator[bytes], callers: int) -> None:
        self.sock = _connected(task)
        self._bodies = bodies
        self._callers = callers
        authority = f"127.0.0.1:{task.port}"
        self._block = b"\x83\x86" + b"".join(  # :method POST, :scheme http
            b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
            for name, value in (
                (":path", task.path),
                (":authority", authority),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                *([("authorization", f"Bearer {task.key}")] if task.key else []),
            )
        )
        self._next_id = 1
        self._began: dict[int, float] = {}
        self._bytes: dict[int, int] = {}
        self._buffer = bytearray()
        settings = struct.pack(">HI", 4, _WINDOW)  # INITIAL_WINDOW_SIZE
        opening = _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW))
        self.sock.sendall(_PREFACE + opening)
        self._unreported = 0

    def start(self) -> None:
        """Send one call of each caller."""
        self.sock.sendall(b"".join(self._call() for _ in range(self._callers)))

    def received(self, on_reply: Callable[[float, float], None]) -> bool:
        """Read frames; all calls that follow leave in one write."""
        data = self.sock.recv(_RECEIVE_BYTES)
        if not data:
            if self._began:
                raise LoadFailed("the server closed a connection")
            return False
        self._buffer += data
        out: list[bytes] = []
        at, buffer = 0, self._buffer
        while len(buffer) - at >= 9:
            high, low, kind, flags, stream = _HEAD.unpack_from(buffer, at)
            size = high << 16 | low
            if len(buffer) - at < 9 + size:
                break
            self._frame_received(kind, flags, stream, buffer, at + 9, size, out, on_reply)
            at += 9 + size
        del buffer[:at]
        if self._unreported > _WINDOW // 2:
            out.append(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._unreported)))
            self._unreported = 0
        if out:
            self.sock.sendall(b"".join(out))
        return True

    def _frame_received(
        self,
        kind: int,
        flags: int,
        stream: int,
        buffer: bytearray,
        at: int,
        size: int,
        out: list[bytes],
        on_reply: Callable[[float, float], None],
    ) -> None:
        if kind == DATA:
            self._unreported += size
            self._bytes[stream] = self._bytes.get(stream, 0) + size
        elif kind == _SETTINGS and not flags & _ACK:
            out.append(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            out.append(_frame(_PING, _ACK, 0, bytes(buffer[at : at + size])))
        elif kind in (_RST_STREAM, _GOAWAY) and self._began:
            raise LoadFailed(f"frame {kind} with {bytes(buffer[at : at + size])!r}")
        if kind in (DATA, _HEADERS) and flags & _END_STREAM:
            if self._bytes.pop(stream, 0) <= 5:  # a failure has headers alone
                raise LoadFailed(f"a call failed: {bytes(buffer[at : at + size])!r}")
            on_reply(self._began.pop(stream), time.perf_counter())
            out.append(self._call())

    def _call(self) -> bytes:
        body = next(self._bodies, None)
        if body is None:
            return b""
        stream, self._next_id = self._next_id, self._next_id + 2
        self._began[stream] = time.perf_counter()
        message = b"\0" + len(body).to_bytes(4) + body
        parts = [_frame(_HEADERS, _END_HEADERS, stream, self._block)]
        starts = range(0, len(message), 16384)
        for start in starts:
            is_last = start == starts[-1]
            parts.append(_frame(DATA, _END_STREAM if is_last else 0, stream, message[start : start + 16384]))
        return b"".join(parts)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _HEAD.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _connected(task: LoadTask) -> socket.socket:
    if task.unix:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(task.unix)
        return sock
    sock = socket.create_connection(("127.0.0.1", task.port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class _Bodies(Iterator[bytes]):
    """The bodies again and again, until they are ended; `taken` counts them."""

    def __init__(self, requests: list[bytes]) -> None:
        self._cycle = cycle(requests)
        self.taken = 0
        self.ended = False

    def __next__(self) -> bytes:
        if self.ended:
            raise StopIteration
        self.taken += 1
        return next(self._cycle)


# Callers of gRPC share connections, as channels of a client library do.
_CALLERS_PER_CONNECTION = 32


def run_load(
    task: LoadTask, requests: list[bytes], callers: int, seconds: float, whole: bool = False
) -> dict[str, float]:
    """Have `callers` call for `seconds`, after a warm-up; latencies in ms.

    A `whole` run has no warm-up, and ends with the reply to the last call that began in the time: of calls that take
    seconds a window would cut off a part that depends on the server, which would also still work on them afterwards.

    Raises:
        LoadFailed: a reply is no success, or nothing came for half a minute, or in the time measured.
    """
    kind: Any = {"http": HttpConnection, "grpc": GrpcConnection}[task.kind]
    most = 1 if task.kind == "http" else _CALLERS_PER_CONNECTION
    bodies = _Bodies(requests)
    shares = [min(most, callers - first) for first in range(0, callers, most)]
    connections: list[Connection] = [kind(task, bodies, share) for share in shares]
    poll = select.epoll()
    by_number = {connection.sock.fileno(): connection for connection in connections}
    latencies: list[float] = []
    used = time.process_time()
    begin = time.perf_counter() + (0.0 if whole else _WARM_S)
    end = begin + seconds
    calls = 0

    def on_reply(began: float, ended: float) -> None:
        nonlocal calls
        calls += 1
        if ended > begin:
            latencies.append(ended - began)

    try:
        for number, connection in by_number.items():
            poll.register(number, select.EPOLLIN)
            connection.start()
        while not bodies.ended or (whole and calls < bodies.taken):
            events = poll.poll(_SILENCE_S)
            if not events:
                raise LoadFailed(f"nothing came for {_SILENCE_S:g} s")
            bodies.ended = time.perf_counter() >= end
            for number, _ in events:
                if not by_number[number].received(on_reply):
                    poll.unregister(number)  # idle: every call has begun, and others are awaited
    finally:
        poll.close()
        for connection in connections:
            connection.sock.close()
    if not latencies:
        raise LoadFailed(f"no reply in {seconds:g} s")
    p50, p99 = np.percentile(latencies, (50, 99)).tolist()
    return {
        "calls": len(latencies),
        "all_calls": calls,
        "p50_ms": p50 * 1e3,
        "p99_ms": p99 * 1e3,
        "max_ms": max(latencies) * 1e3,
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - used,
    }


def main() -> None:
    """Serve until stdin ends."""
    task = LoadTask(**json.loads(sys.argv[1]))
    requests: list[bytes] = []
    print("{}", flush=True)
    for line in sys.stdin:
        [(verb, argument)] = json.loads(line).items()
        try:
            if verb == "requests":
                requests = [base64.b64decode(one) for one in json.loads(Path(argument).read_text())]
                answer: dict[str, Any] = {}
            else:
                answer = run_load(task, requests, **argument)
        except (LoadFailed, OSError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
