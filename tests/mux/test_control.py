"""The control link of a real mux over mutual TLS: who may use it, how it is proved, what comes over it."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc.aio
import pytest
from tests.support.cluster import FleetNodes
from tests.support.credentials import Authority, needs_openssl
from tests.support.frame_worker import FrameWorker, lengths
from tests.support.mux_process import embed, running, stub
from tests.support.polling import eventually

from teimgr.config.mux import MuxConfig
from teimgr.control.launch.control_link import MuxDisconnected, MuxLink, MuxLost
from teimgr.control.launch.mux_launcher import LocalMux, MuxPaths, spawn_mux
from teimgr.control.launch.remote_control import open_mux_link
from teimgr.errors import Unavailable
from teimgr.http.auth.policy import Policy
from teimgr.http.server import bind
from teimgr.mux import control
from teimgr.mux.control import DaemonLoads, Message
from teimgr.spec import RouteEntry, RoutingSnapshot
from teimgr.wire.fleet_tls import FleetIdentity
from teimgr.wire.remote_frames import RemoteAddress

LIMIT_S = 30.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> FleetNodes:
    found = FleetNodes(tmp_path_factory.mktemp("fleet"))
    found.renew("two")
    return found


@asynccontextmanager
async def mux_on(nodes: FleetNodes, **more: object) -> AsyncIterator[tuple[LocalMux, RemoteAddress]]:
    """A mux of node `two`, and where it listens for the daemon."""
    folder = Path(tempfile.mkdtemp(prefix="t"))
    paths = MuxPaths(folder, "mux-0")
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        config = MuxConfig(
            host="127.0.0.1",
            port=0,
            control_socket=str(paths.socket),
            run_dir=str(folder),
            node="two",
            identity_dir=str(nodes.folder("two")),
            incarnation="aa",
            control_fd=listener.fileno(),
            **more,  # type: ignore[arg-type]
        )
        mux = spawn_mux(paths, config, "x", folder / "mux.log", 1 << 20, 1)
        host, port = listener.getsockname()
    try:
        yield mux, RemoteAddress(host, port, "two", "aa")
    finally:
        await mux.stop(0)
        shutil.rmtree(folder)


async def serving(link: MuxLink, *entries: RouteEntry) -> dict[str, object]:
    link.send(policy=Policy().to_json(), snapshot=RoutingSnapshot(entries).to_json())
    return await link.ask("stats")


async def test_the_daemon_feeds_a_mux_of_another_host(nodes: FleetNodes, tmp_path: Path) -> None:
    worker = FrameWorker(tmp_path / "w.sock", "incarnation", lengths)
    await worker.listen()
    async with mux_on(nodes) as (mux, address):
        link = await open_mux_link(address, nodes.identity(""), LIMIT_S)

        stats = await serving(link, running("a", worker))

        assert stats["pid"] == mux.pid
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stats['port']}") as channel:
            assert list((await stub(channel, "Embed")(embed("xxx"))).embeddings) == [3.0]
        link.close()
    worker.drop()


@pytest.mark.parametrize(
    ("who", "incarnation", "node", "reason"),
    [
        ("one", "aa", "two", "spiffe://teimgr/node/one may not control a mux"),
        ("", "bb", "two", "it expects another process"),
        ("", "aa", "three", "the certificate is that of spiffe://teimgr/node/two, not of node 'three'"),
    ],
)
async def test_another_node_another_process_and_another_host_are_refused(
    nodes: FleetNodes, who: str, incarnation: str, node: str, reason: str
) -> None:
    async with mux_on(nodes) as (_, address):
        right = await open_mux_link(address, nodes.identity(""), LIMIT_S)
        wrong = address._replace(incarnation=incarnation, node=node)

        with pytest.raises(MuxLost, match=reason):
            await open_mux_link(wrong, nodes.identity(who), 1.0)

        assert (await serving(right))["instances"] == 0
        right.close()


async def test_a_peer_without_a_certificate_of_the_fleet_is_refused(nodes: FleetNodes, tmp_path: Path) -> None:
    stranger = FleetNodes(tmp_path).identity("")
    async with mux_on(nodes) as (_, address):
        right = await open_mux_link(address, nodes.identity(""), LIMIT_S)  # it is up

        with pytest.raises(MuxLost, match="certificate verify failed"):
            await open_mux_link(address, stranger, 1.0)
        right.close()


async def test_a_connection_ends_with_its_certificate_and_the_next_one_has_the_new(nodes: FleetNodes) -> None:
    async with mux_on(nodes) as (_, address):
        (await open_mux_link(address, nodes.identity(""), LIMIT_S)).close()  # it is up: no second of the next is lost
        identity: FleetIdentity = nodes.identity("", valid_s=2.0)
        link = await open_mux_link(address, identity, LIMIT_S)
        await serving(link)

        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(MuxDisconnected):
                await link.wait(asyncio.Event(), LIMIT_S)
        link.close()

        nodes.renew("")
        again = await open_mux_link(address, identity, LIMIT_S)
        assert (await serving(again))["instances"] == 0
        again.close()


async def test_without_the_daemon_it_stops_after_the_grace(nodes: FleetNodes) -> None:
    async with mux_on(nodes, orphan_grace_s=0.5) as (mux, address):
        link = await open_mux_link(address, nodes.identity(""), LIMIT_S)
        await serving(link)
        link.close()

        async with asyncio.timeout(LIMIT_S):
            assert (await mux.wait()).status == 0


@needs_openssl
async def test_certificates_of_the_port_come_from_the_daemon_and_are_replaced(
    nodes: FleetNodes, tmp_path: Path
) -> None:
    first, second = (Authority(tmp_path / name, name) for name in ("first", "second"))

    def texts(authority: Authority) -> str:
        files = authority.server()
        return json.dumps({"cert": files.cert.read_text(), "key": files.key.read_text(), "ca": None})

    async with mux_on(nodes, tls_from_daemon=True) as (_, address):
        link = await open_mux_link(address, nodes.identity(""), LIMIT_S)
        assert (await link.ask("stats"))["port"] == 0, "it waits for the certificates"
        link.send(tls=texts(first))
        await serving(link)

        async def listens() -> object:
            return (await link.ask("stats"))["port"]

        async def is_served(authority: Authority) -> bool:
            credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.secure_channel(f"localhost:{port}", credentials, options=options) as channel:
                return await stub(channel, "Embed")(embed("x")).code() is grpc.StatusCode.NOT_FOUND

        await eventually(listens)
        port = await listens()
        for authority in (first, second):
            link.send(tls=texts(authority))
            await eventually(partial(is_served, authority))
        link.close()


async def test_calls_that_wait_for_their_model_ask_the_next_daemon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They failed when a daemon left them to its successor, which went on with the load."""
    daemons, asked = [1], []

    def send(message: Message) -> bool:
        if daemons:
            asked.append(message)
        return bool(daemons)

    async def call(loads: DaemonLoads, instance: str, timeout_s: float | None) -> str:
        async with loads.loaded(instance, timeout_s):
            return instance

    loads = DaemonLoads(send)
    first = asyncio.create_task(call(loads, "a", 300.0))
    await eventually(lambda: bool(asked))
    daemons.clear()
    loads.lost()
    second = asyncio.create_task(call(loads, "b", None))  # while there is none
    await asyncio.sleep(0)
    daemons.append(2)
    loads.take({"snapshot": []})
    loads.take({"snapshot": []})

    assert [each["load"][:2] for each in asked] == [[1, "a"], [1, "a"], [2, "b"]]
    assert asked[1]["load"][2] < 300.0
    loads.take({"ready": 1})
    loads.take({"ready": 2})
    assert await asyncio.gather(first, second) == ["a", "b"]

    monkeypatch.setattr(control, "NEXT_DAEMON_S", 0.05)
    daemons.clear()
    loads.lost()
    with pytest.raises(Unavailable, match="has ended"):
        await call(loads, "a", 300.0)
    with pytest.raises(Unavailable, match="no daemon is here"):
        await call(loads, "a", 300.0)
