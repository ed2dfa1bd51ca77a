"""Joining the fleet and renewing over real sockets and certificates."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from teimgr.cluster.authority import new_request
from teimgr.cluster.enrolment_server import EnrolmentServer
from teimgr.cluster.node_identity import join, renew, seconds_to_renewal
from teimgr.errors import Forbidden, Unauthenticated, Unavailable
from teimgr.fleet_tls import FleetIdentity, new_context, peer_of

HOST = "127.0.0.1"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EnrolmentServer]:
    server = EnrolmentServer(tmp_path / "cluster")
    await server.start(HOST, 0)
    yield server
    await server.close()


async def joined(server: EnrolmentServer, folder: Path, node: str = "gpu-1") -> FleetIdentity:
    await join(*server.address, str(server.create_token(None, 60)), node, folder)
    return FleetIdentity(folder, node)


async def ask(server: EnrolmentServer, line: bytes, context: ssl.SSLContext | None = None) -> dict[str, object]:
    if context is None:
        context = new_context(ssl.PROTOCOL_TLS_CLIENT)
        context.verify_mode = ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(*server.address, ssl=context)
    try:
        writer.write(line)
        answer: dict[str, object] = json.loads(await reader.readline())
        return answer
    finally:
        writer.close()


async def test_a_node_joins_and_its_certificate_names_it(server: EnrolmentServer, tmp_path: Path) -> None:
    identity = await joined(server, tmp_path / "node")

    _, writer = await asyncio.open_connection(*server.address, ssl=identity.client_context())
    assert peer_of(writer.get_extra_info("ssl_object")).name.is_daemon
    writer.close()
    assert [each.name for each in server.enrolment.nodes] == ["gpu-1"]
    assert {each.stat().st_mode & 0o777 for each in (tmp_path / "node").iterdir()} == {0o600}
    assert 20 * 3600 < seconds_to_renewal(tmp_path / "node") < 24 * 3600


async def test_a_token_is_good_for_one_node(
    server: EnrolmentServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = str(server.create_token(None, 60))
    await join(*server.address, token, "a", tmp_path / "a")

    with caplog.at_level(logging.WARNING), pytest.raises(Unauthenticated, match="was used by node 'a'"):
        await join(*server.address, token, "b", tmp_path / "b")
    assert not (tmp_path / "b").exists()
    (record,) = [each for each in caplog.records if each.message == "enrolment refused"]
    assert (record.node, record.code) == ("b", "UNAUTHENTICATED")  # type: ignore[attr-defined]


async def test_the_token_is_not_sent_to_another_daemon(server: EnrolmentServer, tmp_path: Path) -> None:
    other = EnrolmentServer(tmp_path / "other")
    await other.start(HOST, 0)
    token = str(server.create_token(None, 60))
    try:
        with pytest.raises(Unauthenticated, match="not the daemon that made the join token"):
            await join(*other.address, token, "a", tmp_path / "a")
    finally:
        await other.close()
    await join(*server.address, token, "a", tmp_path / "a")


async def test_a_renewal_replaces_key_and_certificate_and_contexts_follow(
    server: EnrolmentServer, tmp_path: Path
) -> None:
    identity = await joined(server, tmp_path / "node")
    before, context = (tmp_path / "node" / "identity.pem").read_bytes(), identity.client_context()

    await renew(*server.address, identity)

    assert (tmp_path / "node" / "identity.pem").read_bytes() != before
    assert identity.client_context() is not context
    await renew(*server.address, identity)  # with the new one


async def test_a_removed_node_gets_no_renewal(server: EnrolmentServer, tmp_path: Path) -> None:
    identity = await joined(server, tmp_path / "node")
    server.enrolment.remove("gpu-1")

    with pytest.raises(Forbidden, match="'gpu-1' is not in the fleet"):
        await renew(*server.address, identity)


async def test_renewal_without_a_certificate_is_refused(server: EnrolmentServer) -> None:
    _, request = new_request()

    answer = await ask(server, json.dumps({"op": "renew", "request": request.decode()}).encode() + b"\n")

    assert "does not name" in json.dumps(answer)


@pytest.mark.parametrize(
    "line", [b"\n", b"[]\n", b'{"op": "x"}\n', b'{"op": "join", "node": 1}\n', b"x" * 70_000 + b"\n"]
)
async def test_malformed_requests_get_a_typed_refusal(server: EnrolmentServer, line: bytes) -> None:
    answer = await ask(server, line)

    assert answer["error"]["code"] == 3  # type: ignore[index]


async def test_what_is_no_daemon_is_unavailable(tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), HOST, 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(Unavailable, match=f"{host}:{port}"):
            await join(host, port, "teimgr1.a.b.c", "a", tmp_path)


async def test_files_that_break_later_leave_the_former_contexts(
    server: EnrolmentServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    identity = await joined(server, tmp_path / "node")
    context = identity.client_context()
    (tmp_path / "node" / "identity.pem").write_text("nothing")

    assert identity.client_context() is context
    assert "the former one stays" in caplog.text
