"""Real servers on free ports, with and without TLS, and certificates made for the session."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from tests.support.small_servers import Certificates, Daemon, Multiplexer, handlers, serve

from teimgr.client import AsyncClient

MESSAGE_BYTES = 64 * 1024 * 1024


@pytest.fixture(scope="session")
def certificates() -> Iterator[Certificates]:
    with tempfile.TemporaryDirectory(prefix="t") as name:
        folder = Path(name)
        openssl(
            folder,
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.pem "
            "-days 2 -subj /CN=test-authority",
        )
        for who, extension in (("server", "subjectAltName=DNS:localhost"), ("client", "subjectAltName=DNS:client")):
            (folder / f"{who}.ext").write_text(extension)
            openssl(
                folder,
                "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes "
                f"-keyout {who}.key -out {who}.csr -subj /CN={who}",
            )
            openssl(
                folder,
                f"x509 -req -in {who}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
                f"-extfile {who}.ext -out {who}.pem",
            )
        paths = (folder / name for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key"))
        yield Certificates(*paths)


def openssl(folder: Path, arguments: str) -> None:
    """Run openssl in `folder`."""
    subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture
def multiplexer() -> Multiplexer:
    return Multiplexer()


@pytest.fixture
async def mux_url(multiplexer: Multiplexer) -> AsyncIterator[str]:
    server = make_server(multiplexer)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"http://127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def mtls_urls(
    multiplexer: Multiplexer, certificates: Certificates, tmp_path: Path
) -> AsyncIterator[tuple[str, str]]:
    """A server that asks for client certificates, on a port and at a Unix socket."""
    server = make_server(multiplexer)
    pair = (certificates.server_key.read_bytes(), certificates.server_cert.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], certificates.ca.read_bytes(), require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.add_secure_port(f"unix:{tmp_path}/grpc.sock", credentials)
    await server.start()
    yield f"https://localhost:{port}", f"https+unix:{tmp_path}/grpc.sock"
    await server.stop(None)


def make_server(multiplexer: Multiplexer) -> grpc.aio.Server:
    """A server of the multiplexer's methods that takes large messages."""
    sizes = [("grpc.max_receive_message_length", MESSAGE_BYTES), ("grpc.max_send_message_length", MESSAGE_BYTES)]
    server = grpc.aio.server(options=sizes)
    server.add_generic_rpc_handlers(handlers(multiplexer))
    return server


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
async def api_url(daemon: Daemon) -> AsyncIterator[str]:
    async with serve(daemon) as url:
        yield url


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port that refuses connections: bound by this test and never listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
async def client(api_url: str, mux_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(api_url, mux_url, timeout_s=20) as client:
        yield client
