"""Joining the fleet and renewing over real sockets and certificates."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import ssl
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from tests.support.polling import eventually

from teimgr.cluster import enrolment_server
from teimgr.cluster import node as node_module
from teimgr.cluster.authority import FleetAuthority, new_request, utc_now
from teimgr.cluster.enrolment_server import EnrolmentServer
from teimgr.cluster.messages import Versions
from teimgr.cluster.node import renew, seconds_to_renewal
from teimgr.errors import Forbidden, InvalidConfig, StorageFull, Unauthenticated, Unavailable
from teimgr.wire.fleet_tls import (
    CLOCKS_APART_S,
    DAEMON,
    IDENTITY_FILE,
    REMOVED_FILE,
    FleetIdentity,
    FleetName,
    Peer,
    new_context,
    peer_of,
    write_identity,
)

HOST = "127.0.0.1"


VERSIONS = Versions(teimgr="0.1.0", ray="2.60.0", python="3.11.7", torch="2.13.0")


def enrolment(folder: Path) -> EnrolmentServer:
    return EnrolmentServer(folder, "head", VERSIONS, lambda: "ray's token")


async def join(host: str, port: int, token: str, node: str, folder: Path) -> str:
    """`node_module.join`, with the daemon's versions."""
    return await node_module.join(host, port, token, FleetIdentity(folder, node), VERSIONS)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EnrolmentServer]:
    server = enrolment(tmp_path / "cluster")
    await server.start(HOST, 0)
    yield server
    await server.close()


async def joined(server: EnrolmentServer, folder: Path, node: str = "gpu-1") -> FleetIdentity:
    await join(*server.address, await server.join_token(None, 60), node, folder)
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


async def test_other_versions_are_refused_by_name_and_leave_the_token_unused(
    server: EnrolmentServer, tmp_path: Path
) -> None:
    token, identity = await server.join_token(None, 60), FleetIdentity(tmp_path / "a", "a")
    older = replace(VERSIONS, ray="2.59.0")

    with pytest.raises(InvalidConfig, match=r"versions differ from the daemon's: ray 2\.60\.0 \(here 2\.59\.0\)"):
        await node_module.join(*server.address, token, identity, older)
    assert await node_module.join(*server.address, token, identity, VERSIONS) == "ray's token"
    with pytest.raises(InvalidConfig, match="versions differ"):
        await node_module.enter(*server.address, identity, older)
    await renew(*server.address, identity)  # it goes on: a host that is updated later keeps its links


async def test_a_stranger_learns_no_versions_and_a_refused_request_uses_no_token_up(
    server: EnrolmentServer, tmp_path: Path
) -> None:
    other = dict.fromkeys(asdict(VERSIONS), "0")
    asked = {"op": "join", "node": "a", "versions": other, "clock": utc_now().timestamp(), "token": "teimgr1.a.b.c"}
    _, request = new_request()
    answer = await ask(server, json.dumps(asked | {"request": request.decode()}).encode() + b"\n")
    assert "unknown" in json.dumps(answer)
    assert VERSIONS.ray not in json.dumps(answer)

    token = await server.join_token(None, 60)
    broken = asked | {"versions": asdict(VERSIONS), "token": token, "request": "no request"}
    assert "certificate request" in json.dumps(await ask(server, json.dumps(broken).encode() + b"\n"))
    assert await join(*server.address, token, "a", tmp_path / "a") == "ray's token"


async def test_a_host_whose_clock_is_late_is_refused_by_name_and_leaves_the_token_unused(
    server: EnrolmentServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, identity = await server.join_token(None, 60), FleetIdentity(tmp_path / "a", "a")
    late_s = CLOCKS_APART_S + 60

    with monkeypatch.context() as late:
        late.setattr(node_module, "utc_now", lambda: utc_now() - timedelta(seconds=late_s))
        refused = rf"this host's clock is {late_s:.0f} s behind the daemon's, at most {CLOCKS_APART_S:.0f} s"
        with pytest.raises(InvalidConfig, match=refused):
            await node_module.join(*server.address, token, identity, VERSIONS)
        late.setattr(node_module, "utc_now", lambda: utc_now() - timedelta(seconds=CLOCKS_APART_S - 60))
        assert await node_module.join(*server.address, token, identity, VERSIONS) == "ray's token"
        late.setattr(node_module, "utc_now", lambda: utc_now() - timedelta(seconds=late_s))
        with pytest.raises(InvalidConfig, match=refused):
            await node_module.enter(*server.address, identity, VERSIONS)
    assert await node_module.enter(*server.address, identity, VERSIONS) == "ray's token"


@pytest.mark.parametrize(("apart", "reason"), [(3, "certificate is not yet valid"), (-96, "certificate has expired")])
async def test_a_daemon_is_refused_with_this_hosts_clock_where_its_certificate_is_not_valid_by_that(
    tmp_path: Path, apart: float, reason: str
) -> None:
    server = enrolment(tmp_path / "cluster")
    authority = FleetAuthority(tmp_path / "cluster" / "ca", lambda: utc_now() + timedelta(hours=apart))
    write_identity(server.identity.folder, *authority.issue_own(DAEMON), authority.authorities())
    await server.start(HOST, 0)
    try:
        clock = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        with pytest.raises(Unauthenticated, match=rf"{reason} by this host's clock, {clock}.*: set it"):
            await joined(server, tmp_path / "a")
    finally:
        await server.close()


async def test_a_host_with_a_certificate_needs_no_token_and_a_refused_one_needs_a_new(
    server: EnrolmentServer, tmp_path: Path
) -> None:
    identity = FleetIdentity(tmp_path / "a", "a")

    async def admitted(token: str = "") -> str:
        return await node_module.admission(*server.address, identity, token, VERSIONS)

    with pytest.raises(InvalidConfig, match=r"node 'a' has no valid certificate .* `teimgr cluster token`"):
        await admitted()
    token = await server.join_token(None, 60)
    assert [await admitted(token), await admitted(token), await admitted()] == ["ray's token"] * 3

    server.enrolment.remove("a")
    with pytest.raises(Forbidden, match="'a' is not in the fleet"):
        await admitted()
    with pytest.raises(Unauthenticated, match="was used by node 'a'"):
        await admitted(token)
    assert await admitted(await server.join_token(None, 60)) == "ray's token"


async def test_the_name_of_the_daemons_own_host_is_taken(server: EnrolmentServer, tmp_path: Path) -> None:
    with pytest.raises(Forbidden, match="'head' is the daemon's own host"):
        await join(*server.address, await server.join_token("head", 60), "head", tmp_path / "a")


async def test_a_token_is_good_for_one_node(
    server: EnrolmentServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = await server.join_token(None, 60)
    await join(*server.address, token, "a", tmp_path / "a")

    with caplog.at_level(logging.WARNING), pytest.raises(Unauthenticated, match="was used by node 'a'"):
        await join(*server.address, token, "b", tmp_path / "b")
    assert not (tmp_path / "b").exists()
    (record,) = [each for each in caplog.records if each.message == "enrolment refused"]
    assert (record.node, record.code) == ("b", "UNAUTHENTICATED")  # type: ignore[attr-defined]


async def test_the_token_is_not_sent_to_another_daemon(server: EnrolmentServer, tmp_path: Path) -> None:
    other = enrolment(tmp_path / "other")
    await other.start(HOST, 0)
    token = await server.join_token(None, 60)
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


async def test_the_certificate_of_a_removed_node_is_revoked_and_it_may_join_again(
    server: EnrolmentServer, tmp_path: Path
) -> None:
    identity = await joined(server, tmp_path / "node")
    before = peer_in(identity)
    server.node_identity.check(before)

    assert await server.remove_host("gpu-1")
    assert not server.is_member("gpu-1")

    for own in (server.identity, server.node_identity):
        with pytest.raises(Unauthenticated, match="node 'gpu-1' was removed from the fleet"):
            own.check(before)
    again = await joined(server, tmp_path / "again")
    assert server.is_member("gpu-1")
    server.node_identity.check(peer_in(again))
    server.node_identity.check(before._replace(name=FleetName("gpu-2")))


def peer_in(identity: FleetIdentity) -> Peer:
    """As others see the node."""
    certificate = x509.load_pem_x509_certificate((identity.folder / "identity.pem").read_bytes())
    issued_at = certificate.not_valid_before_utc.timestamp() + CLOCKS_APART_S
    return Peer(FleetName(identity.node), 3600.0, issued_at)


async def test_a_node_whose_clock_is_days_ahead_renews_no_more_than_once_a_minute(
    server: EnrolmentServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity, pauses = await joined(server, tmp_path / "node"), list[float]()

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 2:
            raise asyncio.CancelledError

    monkeypatch.setattr(node_module, "utc_now", lambda: utc_now() + timedelta(hours=48))
    monkeypatch.setattr("teimgr.cluster.node.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await node_module.keep_renewed(*server.address, identity)

    assert seconds_to_renewal(identity.folder) < 0  # the new certificate looks old too
    assert pauses == [60.0, 60.0]


async def test_renewal_without_a_certificate_is_refused(server: EnrolmentServer) -> None:
    _, request = new_request()

    answer = await ask(server, json.dumps({"op": "renew", "request": request.decode()}).encode() + b"\n")

    assert "does not name" in json.dumps(answer)


@pytest.mark.parametrize(
    "line",
    [b"\n", b"[]\n", b"[" * 60_000 + b"\n", b'{"op": "x"}\n', b'{"op": "join", "node": 1}\n', b"x" * 70_000 + b"\n"],
)
async def test_malformed_requests_get_a_typed_refusal(server: EnrolmentServer, line: bytes) -> None:
    answer = await ask(server, line)

    assert answer["error"]["code"] == 3  # type: ignore[index]


@pytest.mark.parametrize("clock", ["null", "true", '"1"', "NaN", "Infinity", "-1", "1" + 400 * "0"])
async def test_a_clock_that_is_no_time_gets_a_typed_refusal(server: EnrolmentServer, clock: str) -> None:
    line = f'{{"op": "join", "node": "a", "versions": {json.dumps(asdict(VERSIONS))}, "clock": {clock}}}\n'

    answer = await ask(server, line.encode())

    assert answer == {
        "error": {"code": 3, "message": "enrolment request: clock: a time in seconds since the epoch is expected"}
    }


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


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"])
async def test_silent_clients_stop_neither_joins_nor_renewals(
    server: EnrolmentServer, tmp_path: Path, said: bytes
) -> None:
    member = await joined(server, tmp_path / "member", "gpu-0")
    silent = [await asyncio.open_connection(*server.address) for _ in range(200)]
    for _, writer in silent:
        writer.write(said)

    async with asyncio.timeout(20):
        await joined(server, tmp_path / "node")
        await renew(*server.address, member)
    for _, writer in silent:
        writer.close()


async def test_clients_without_a_request_behind_their_handshake_stop_neither_joins_nor_renewals(
    server: EnrolmentServer, tmp_path: Path
) -> None:
    """80 did: 64 could be answered at a time, and each had ten seconds."""
    context = new_context(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_NONE
    member = await joined(server, tmp_path / "member", "gpu-0")
    silent = [await asyncio.open_connection(*server.address, ssl=context) for _ in range(80)]

    async with asyncio.timeout(20):
        await joined(server, tmp_path / "node")
        await renew(*server.address, member)
    for _, writer in silent:
        writer.close()


async def test_a_certificate_is_renewed_after_one_of_its_files_could_not_be_read(
    server: EnrolmentServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task ended for good at one such moment; its host lost its links three days later."""
    identity = await joined(server, tmp_path / "a", "a")
    file = identity.folder / IDENTITY_FILE
    before = file.read_bytes()
    monkeypatch.setattr(node_module, "_RENEW_AT", -1.0)  # it is due
    monkeypatch.setattr(node_module, "_RETRY_S", 0.01)
    for content in (None, before[:100]):
        file.unlink() if content is None else file.write_bytes(content)
        renewing = asyncio.create_task(node_module.keep_renewed(*server.address, identity))
        await asyncio.wait({renewing}, timeout=0.05)
        assert not renewing.done()
        file.write_bytes(before)
        await eventually(lambda before=before: file.read_bytes() != before)
        renewing.cancel()
        before = file.read_bytes()


async def test_a_list_of_removed_nodes_that_the_disk_refused_is_written_at_the_next_try(
    server: EnrolmentServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = await joined(server, tmp_path / "a", "a")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(enrolment_server, "write_removed", refuse)
        with pytest.raises(StorageFull):
            await server.remove_host("a")

    assert await server.remove_host("a")
    assert "a" in json.loads((server.identity.folder / REMOVED_FILE).read_text())
    assert not await server.remove_host("a"), "it is gone, and all have the list"
    with pytest.raises(Forbidden):
        await renew(*server.address, identity)
