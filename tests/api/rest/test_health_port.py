"""The port for probes: what it answers, that it says nothing else, and what it costs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.credentials import Authority, needs_openssl
from tests.support.daemon_process import WarmDaemonProcess, free_ports
from tests.support.http_peers import LIMIT_S

from teimgr.api.rest import health_port
from teimgr.api.rest.health_port import Word, serving_health
from teimgr.http.server import bind


@dataclass
class Probed:
    """A port, and what the daemon behind it does."""

    port: int
    word: Word = "ready"

    async def ask(self, target: str, method: str = "GET") -> tuple[int, str]:
        """Status and body of the answer, behind which the connection must end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"{method} {target} HTTP/1.1\r\nhost: 10.1.2.3\r\n\r\n".encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()
        return int(head.split()[1]), body


@pytest.fixture
async def probed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Probed]:
    monkeypatch.setattr(health_port, "_LIMIT_S", getattr(request, "param", LIMIT_S))
    sock = bind("127.0.0.1", 0)
    found = Probed(sock.getsockname()[1])
    async with asyncio.timeout(LIMIT_S), serving_health(sock, lambda: found.word):
        yield found


async def test_each_state_of_the_daemon_is_a_status_and_one_word(probed: Probed) -> None:
    for word, status in (("starting", 503), ("ready", 200), ("stopping", 503)):
        probed.word = word
        assert await probed.ask("/readyz") == (status, word)
        assert await probed.ask("/livez?verbose") == (200, "alive")


async def test_it_answers_nothing_else(probed: Probed) -> None:
    for target in ("/", "/health", "/instances", "/metrics", "/livez/", "/docs"):
        assert await probed.ask(target) == (404, "unknown")
    assert await probed.ask("/livez", "POST") == (405, "refused")
    assert await probed.ask("/readyz", "HEAD") == (200, "")


@pytest.mark.parametrize("probed", [1.0], indirect=True)
async def test_silent_connections_neither_stay_nor_keep_probes_out(probed: Probed) -> None:
    silent = [await asyncio.open_connection("127.0.0.1", probed.port) for _ in range(health_port.MAX_CONNECTIONS)]
    assert await probed.ask("/livez") == (200, "alive")  # in the place of the first
    assert await silent[0][0].read() == b""
    assert await silent[1][0].read() == b""  # after its time
    for _, writer in silent:
        writer.close()


@needs_openssl
def test_probes_need_neither_key_nor_certificate_where_all_else_does(tmp_path: Path) -> None:
    files = Authority(tmp_path / "ours").server()
    mtls = {"ca_cert": str(files.ca), "server_cert": str(files.cert), "server_key": str(files.key)}
    keys = [{"name": "admin", "key": "k" * 32, "rights": ["admin", "read"]}]
    auth = {"enabled": True, "providers": ["mtls", "api_keys"], "mtls": mtls, "api_keys": keys}
    [port] = free_ports(1)
    with WarmDaemonProcess(auth=auth, health_port=port) as daemon:
        assert asyncio.run(Probed(port).ask("/livez")) == (200, "alive")
        assert asyncio.run(Probed(port).ask("/readyz")) == (200, "ready")
        with socket.create_connection(("127.0.0.1", daemon.api_port)) as plain:
            plain.settimeout(LIMIT_S)
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert not plain.recv(100).startswith(b"HTTP/1.1 200")
        assert daemon.stop() == 0
