"""What a daemon tries before it takes over from another one; the port for probes: what it answers and what it costs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from teimgr.config.sections import ClusterSettings
from teimgr.config.settings import Settings
from teimgr.daemon import listeners
from teimgr.daemon.listeners import Word, other_ports, serving_health, try_other_ports
from teimgr.errors import InvalidConfig, PortConflict
from teimgr.http.server import bind
from tests.support.credentials import Authority, needs_openssl
from tests.support.daemon_process import WarmDaemonProcess, free_ports
from tests.support.http_peers import LIMIT_S


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        state_file=tmp_path / "state.toml",
        grpc_host="127.0.0.1",
        grpc_port=1,
        grpc_socket=tmp_path / "grpc.sock",
        cluster=ClusterSettings(address="127.0.0.1:2", enrolment_port=3),
    )


def held(is_shared: bool = False) -> socket.socket:
    """A listener of another program, or of a mux, which shares its port."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
    sock.listen()
    return sock


Change = Callable[[Settings, int], Settings]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda old, port: replace(old, grpc_port=port), "grpc_port"),
        (
            lambda old, port: replace(old, cluster=replace(old.cluster, enrolment_port=port)),
            "cluster.enrolment_port",
        ),
    ],
)
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_port_of_another_program_is_refused_also_where_it_shares_it(
    settings: Settings, change: Change, key: str, is_shared: bool
) -> None:
    with held(is_shared) as other:
        wanted = change(settings, other.getsockname()[1])
        with pytest.raises(PortConflict, match=key):
            try_other_ports(wanted, other_ports(settings))


@pytest.mark.parametrize("before", [None, {}])
def test_muxes_that_live_on_share_their_port(settings: Settings, before: Mapping[str, str] | None) -> None:
    with held(is_shared=True) as mux:
        wanted = replace(settings, grpc_port=mux.getsockname()[1], grpc_socket=None, cluster=ClusterSettings())
        try_other_ports(wanted, None if before is None else other_ports(wanted))


def test_what_the_daemon_before_listens_on_is_free_for_the_next_one(settings: Settings) -> None:
    with held(is_shared=True) as mux, held() as enrolment:
        assert settings.grpc_socket is not None
        settings.grpc_socket.touch()  # stands for the socket of its mux
        cluster = replace(settings.cluster, enrolment_port=enrolment.getsockname()[1])
        wanted = replace(settings, grpc_port=mux.getsockname()[1], cluster=cluster)
        try_other_ports(wanted, other_ports(wanted))


def test_a_file_in_the_place_of_a_new_socket_is_refused(settings: Settings, tmp_path: Path) -> None:
    with held(is_shared=True) as mux:
        before = replace(settings, grpc_port=mux.getsockname()[1])
        (tmp_path / "file").touch()
        with pytest.raises(InvalidConfig, match="not a socket"):
            try_other_ports(replace(before, grpc_socket=tmp_path / "file"), other_ports(before))


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
    monkeypatch.setattr(listeners, "_LIMIT_S", getattr(request, "param", LIMIT_S))
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
    silent = [await asyncio.open_connection("127.0.0.1", probed.port) for _ in range(listeners.MAX_CONNECTIONS)]
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
