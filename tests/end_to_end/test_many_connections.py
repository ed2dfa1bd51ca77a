"""Thousands of connections to a real daemon and a real worker: others are served, and what they took comes back."""

from __future__ import annotations

import http.client
import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess
from tests.support.models import build
from tests.support.polling import until

from teimgr.http.connection_gate import LIMITS, Phase

KEY = f"asking-{'k' * 24}"
ADMIN = f"admin-{'k' * 24}"
AUTH = {
    "enabled": True,
    "providers": ["api_keys"],
    "api_keys": [
        {"name": "asking", "key": KEY, "rights": ["inference"]},
        {"name": "admin", "key": ADMIN, "rights": ["admin", "read"]},
    ],
}
FEW_FILES = 600
"""Open files of a daemon whose port is full with half as many connections."""
OPENED_AT_ONCE = 3000
HEAD = b"Host: localhost\r\nContent-Length: 1000000\r\n"
UNAUTHENTICATED = b"POST /v1/embeddings HTTP/1.1\r\n" + HEAD + b"Content-Type: application/json\r\n\r\n{"  # 401
UNSUPPORTED = b"POST /instances HTTP/1.1\r\n" + HEAD + f"Authorization: Bearer {ADMIN}\r\n\r\n{{".encode()  # 415
SETTLED_MIB = 48
MANY = 10_050
KEPT_KIB = 20
"""Memory that the allocator may keep of each connection for later ones."""
GROWTH = 1.1
"""What the second round may add to the memory after the first."""


class Trickling:
    """Connections that were answered 401 or 415 before their body had come, and go on with it byte by byte."""

    def __init__(self, port: int, count: int) -> None:
        self.statuses: set[int] = set()
        self.open: dict[int, socket.socket] = {}
        self._ready = select.epoll()
        for number in range(count):
            sock = socket.create_connection(("127.0.0.1", port), timeout=30)
            with suppress(ConnectionError):  # another one took its place
                sock.sendall(UNSUPPORTED if number % 2 else UNAUTHENTICATED)
            sock.setblocking(False)
            self.open[sock.fileno()] = sock
            self._ready.register(sock, select.EPOLLIN | select.EPOLLRDHUP)

    def go_on(self, wait_s: float = 1.0) -> None:
        """Read what has come within this time, and send a byte on each connection that is open."""
        for number, _ in self._ready.poll(wait_s):
            self._read(self.open[number])
        for sock in list(self.open.values()):
            try:
                sock.send(b" ")
            except BlockingIOError:
                pass
            except ConnectionError:
                self._end(sock)

    def _read(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if data.startswith(b"HTTP/1.1 "):  # else the rest of an answer
            self.statuses.add(int(data[9:12]))
        elif not data:
            self._end(sock)

    def _end(self, sock: socket.socket) -> None:
        self._ready.unregister(sock)
        del self.open[sock.fileno()]
        sock.close()

    def close(self) -> None:
        for sock in list(self.open.values()):
            self._end(sock)
        self._ready.close()


def status(port: int, path: str, limit_s: float = 20.0, **headers: str) -> int:
    """The status of a request on a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def resident_mib(daemon: DaemonProcess) -> float:
    assert daemon.process is not None
    pages = int(Path(f"/proc/{daemon.process.pid}/statm").read_text().split()[1])
    return pages / 256


def open_files(daemon: DaemonProcess) -> int:
    assert daemon.process is not None
    return sum(1 for _ in Path(f"/proc/{daemon.process.pid}/fd").iterdir())


def check_others_are_served(daemon: DaemonProcess) -> None:
    assert status(daemon.api_port, "/health") == 200
    assert status(daemon.api_port, "/instances", authorization=f"Bearer {ADMIN}") == 200
    assert status(daemon.api_port, "/instances") == 401


def test_answered_clients_that_send_on_leave_a_full_port_to_others() -> None:
    daemon = WarmDaemonProcess(auth=AUTH)
    daemon.within = ("sh", "-c", f'ulimit -n {FEW_FILES}; exec "$@"', "sh")
    with daemon:
        check_others_are_served(daemon)
        memory, files = resident_mib(daemon), open_files(daemon)
        clients = Trickling(daemon.api_port, FEW_FILES * 2 // 3)
        try:
            for _ in range(3):
                clients.go_on(0.2)
                check_others_are_served(daemon)
            assert clients.statuses == {401, 415}
            assert 0 < len(clients.open) <= FEW_FILES // 2
        finally:
            clients.close()
        until(lambda: open_files(daemon) <= files + 10, "the end of the connections")
        assert resident_mib(daemon) < memory + SETTLED_MIB


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_thousand_answered_clients_that_send_on_are_closed_in_time() -> None:
    """Twice, since a process keeps some memory for later: what 10,050 connections take must not add up."""
    limit_s = LIMITS[Phase.DISCARD].seconds + LIMITS[Phase.CLOSING].seconds
    with WarmDaemonProcess(auth=AUTH) as daemon:
        check_others_are_served(daemon)
        memory, files = [resident_mib(daemon)], open_files(daemon)
        for _ in range(2):
            began = time.monotonic()
            clients = Trickling(daemon.api_port, MANY)
            opened = time.monotonic()
            most, slowest = 0, 0.0
            try:
                while clients.open:
                    assert time.monotonic() < opened + limit_s + 60, f"{len(clients.open)} connections are still open"
                    clients.go_on()
                    most = max(most, open_files(daemon))
                    asked = time.monotonic()
                    check_others_are_served(daemon)
                    slowest = max(slowest, time.monotonic() - asked)
                ended = time.monotonic()
            finally:
                clients.close()
            until(lambda: open_files(daemon) <= files + 10, "the end of the connections")
            memory.append(resident_mib(daemon))
            print(
                f"opened in {opened - began:.1f} s, closed after {ended - opened:.1f} s; {most} files at most; the "
                f"slowest three requests of others {slowest:.2f} s; {memory[-2]:.0f} MiB before, {memory[-1]:.0f} after"
            )
            assert clients.statuses == {401, 415}
        assert memory[1] < memory[0] + MANY * KEPT_KIB / 1024
        assert memory[2] < memory[1] * GROWTH


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    model = build("bert", tmp_path_factory.mktemp("model") / "tiny")
    with WarmDaemonProcess() as daemon:
        with daemon.client() as client:
            client.create("a", str(model))
            client.wait_until_running("a", deadline_s=60)
        yield daemon


def test_thousands_opened_at_once_on_an_instances_port_cost_no_probe(serving: DaemonProcess) -> None:
    with serving.client() as client:
        before = client.get("a")
        sockets = [socket.socket() for _ in range(OPENED_AT_ONCE)]
        try:
            for sock in sockets:
                sock.setblocking(False)
                with suppress(BlockingIOError):
                    sock.connect(("127.0.0.1", before.port))
            for _ in range(10):
                assert status(before.port, "/health") == 200
            probed_at = client.get("a").last_health_check
            until(lambda: client.get("a").last_health_check not in (None, probed_at), "a probe beside them")
            assert status(before.port, "/health") == 200
        finally:
            for sock in sockets:
                sock.close()
        after = client.get("a")

    assert (after.pid, after.restarts, after.health_check_failures) == (before.pid, before.restarts, 0)
    assert "health probe" not in serving.log()
