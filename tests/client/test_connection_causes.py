"""Each mistake with an address, a port or TLS is named, by real servers that are met in the wrong way."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from tests.support.small_servers import Certificates, Daemon, serve

from teimgr.client import AsyncClient, Tls
from teimgr.client.connection_causes import diagnose
from teimgr.client.server_address import ServerAddress
from teimgr.errors import Unreachable


async def cause(url: str, tls: Tls | None = None, *, grpc: bool = False) -> tuple[str, str]:
    """What is wrong, and what to do, in a thread: the servers run on this loop."""
    found = await asyncio.to_thread(diagnose, ServerAddress.parse(url), tls or Tls(), grpc=grpc)
    return (found.what, found.do) if found else ("", "")


@pytest.fixture
async def mtls_rest(daemon: Daemon, certificates: Certificates) -> AsyncIterator[str]:
    """A REST port that asks for certificates of clients."""
    async with serve(daemon, certificates.server_context()) as url:
        yield url.replace("127.0.0.1", "localhost")


@pytest.fixture
def proof(certificates: Certificates) -> Tls:
    return Tls(certificates.ca, certificates.client_cert, certificates.client_key)


async def test_the_ports_of_rest_and_grpc_are_told_apart(api_url: str, mux_url: str) -> None:
    what, do = await cause(mux_url)
    assert what == f"{mux_url} is a gRPC port, not REST"
    assert "9000" in do
    assert (await cause(api_url, grpc=True))[0] == f"{api_url} does not speak gRPC"
    assert await cause(api_url) == await cause(mux_url, grpc=True) == ("", "")


async def test_https_that_is_missing_and_https_too_much(api_url: str, mtls_rest: str) -> None:
    plain = mtls_rest.replace("https://", "http://")
    what, do = await cause(plain)
    assert (what, do.split(";")[0]) == (f"{plain} needs https", f"use {mtls_rest}")
    secure = api_url.replace("http://", "https://")
    assert await cause(secure) == (f"{secure} speaks no TLS", f"use {api_url}")


async def test_certificates_of_servers(mtls_rest: str, certificates: Certificates, proof: Tls) -> None:
    assert (await cause(mtls_rest))[0] == f"the certificate of {mtls_rest} is of an unknown authority"
    unknown = await cause(mtls_rest, Tls(certificates.client_cert))
    assert unknown[0].endswith("is of an unknown authority")
    named, do = await cause(mtls_rest, replace(proof, server_name="elsewhere"))
    assert named == f"the certificate of {mtls_rest} is for another name than 'elsewhere'"
    assert "--server-name" in do
    assert await cause(mtls_rest, proof) == ("", "")


async def test_certificates_of_clients(mtls_rest: str, certificates: Certificates, mtls_urls: tuple[str, str]) -> None:
    for url, grpc in ((mtls_rest, False), *((each, True) for each in mtls_urls)):
        what, do = await cause(url, Tls(certificates.ca), grpc=grpc)
        assert what == f"{url} wants a client certificate"
        assert "--cert FILE --key FILE" in do
    refused = Tls(certificates.ca, certificates.server_cert.with_name("stranger.pem"), certificates.server_key)
    refused.cert.write_bytes(self_signed(certificates))  # type: ignore[union-attr]
    assert (await cause(mtls_rest, refused))[0].startswith(f"{mtls_rest} does not accept the client certificate")


def self_signed(certificates: Certificates) -> bytes:
    """A certificate of the server's key that no authority has signed."""
    command = f"openssl req -x509 -new -key {certificates.server_key} -days 2 -subj /CN=stranger"
    return subprocess.run(command.split(), check=True, capture_output=True, timeout=60).stdout


@pytest.fixture
def other_program() -> Iterator[str]:
    """A server that greets with an escape sequence, as no HTTP server does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def greet() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                peer.sendall(b"220 \x1b[2Jmail\r\n")
                peer.recv(1024)

    thread = threading.Thread(target=greet)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


async def test_another_program_and_an_unknown_host(other_program: str) -> None:
    assert (await cause(other_program))[0] == f"{other_program} does not belong to a daemon"
    assert (await cause("http://no-such-host.invalid:9000"))[0] == "no daemon at http://no-such-host.invalid:9000"


async def test_clients_of_python_get_reasons_without_control_characters(other_program: str, mux_url: str) -> None:
    for url in (other_program, mux_url):
        async with AsyncClient(url, timeout_s=5) as client:
            with pytest.raises(Unreachable) as caught:
                await client.health()
        assert caught.value.reason.isprintable()
