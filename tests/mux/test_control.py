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
from teimgr.control.launch.control_link import MuxDisconnected, MuxLink, MuxLost, open_mux_link
from teimgr.control.launch.mux_launcher import LocalMux, MuxPaths, spawn_mux
from teimgr.errors import Unavailable
from teimgr.http.auth.policy import Policy
from teimgr.http.server import bind
from teimgr.mux import control
from teimgr.mux.control import NEXT_DAEMON_S, DaemonLoads, Message, MuxControl
from teimgr.spec import RouteEntry, RoutingSnapshot
from teimgr.wire.fleet_tls import FleetIdentity
from teimgr.wire.json_messages import read_line, write_line
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
        ("", "aa", "three", "the certificate is for spiffe://teimgr/node/two, not for node 'three'"),
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


class Daemon:
    """The daemon's end of a control link: it is one to ask from its first snapshot on."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, **message: object) -> None:
        write_line(self._writer, **message)

    async def snapshot(self) -> None:
        self.send(snapshot=[], ack=True)
        assert await self.next() == {"ack": True}

    async def next(self) -> Message:
        async with asyncio.timeout(LIMIT_S):
            return await read_line(self._reader) or {}

    async def end(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


class WaitingMux:
    """The control socket of a mux, and its calls that wait for models."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.loads = DaemonLoads()
        self.ended = 0
        self.daemons: list[Daemon] = []
        self.control = MuxControl(path, LIMIT_S, self._process, lambda: None, self._lost)

    def _process(self, message: Message, daemon: asyncio.StreamWriter) -> Message | None:
        self.loads.take(message, daemon)
        return {"ack": True} if message.get("ack") else None

    def _lost(self, daemon: asyncio.StreamWriter) -> None:
        self.loads.lost(daemon)
        self.ended += 1

    async def daemon(self) -> Daemon:
        self.daemons.append(Daemon(*await asyncio.open_unix_connection(self.path)))
        return self.daemons[-1]

    async def call(self, instance: str, timeout_s: float | None) -> str:
        async with self.loads.loaded(instance, timeout_s):
            return instance

    def leave(self) -> None:
        self.control.leave({"stopping": 1.0})
        self.loads.leave()


@pytest.fixture
async def mux(tmp_path: Path) -> AsyncIterator[WaitingMux]:
    found = WaitingMux(tmp_path / "mux")
    await found.control.open()
    yield found
    found.leave()
    await found.control.close()
    for daemon in found.daemons:
        await daemon.end()


async def test_calls_that_wait_for_their_model_ask_the_next_daemon_again(
    mux: WaitingMux, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They failed when a daemon left them to its successor, which went on with the load."""
    former = await mux.daemon()
    await former.snapshot()
    first = asyncio.create_task(mux.call("a", 300.0))
    assert (await former.next())["load"][:2] == [1, "a"]
    await former.end()
    await eventually(lambda: mux.ended == 1)
    second = asyncio.create_task(mux.call("b", None))  # while there is none

    daemon = await mux.daemon()
    daemon.send(snapshot=[])
    asked = [(await daemon.next())["load"] for _ in range(2)]

    assert [each[:2] for each in asked] == [[1, "a"], [2, "b"]]
    assert (asked[0][2] < 300.0, asked[1][2]) == (True, None)
    daemon.send(ready=1)
    daemon.send(ready=2)
    assert await asyncio.gather(first, second) == ["a", "b"]
    assert [(await daemon.next())["left"] for _ in range(2)] == [1, 2]

    monkeypatch.setattr(control, "NEXT_DAEMON_S", 0.05)
    await daemon.end()
    await eventually(lambda: mux.ended == 2)
    with pytest.raises(Unavailable, match="has ended"):
        await mux.call("a", 300.0)
    with pytest.raises(Unavailable, match="no daemon is connected"):
        await mux.call("a", 300.0)


async def test_the_next_daemon_is_asked_although_the_link_of_the_former_is_still_there(mux: WaitingMux) -> None:
    """The link of a host that died stays for half a minute: its calls waited until their deadline, or for ever."""
    former, daemon = await mux.daemon(), await mux.daemon()
    await former.snapshot()
    call = asyncio.create_task(mux.call("a", None))
    assert (await former.next())["load"] == [1, "a", None]

    daemon.send(snapshot=[])
    assert (await daemon.next())["load"] == [1, "a", None]
    await daemon.snapshot()  # another one asks nothing again: the model would be held for a second call, for ever
    await former.end()
    await eventually(lambda: mux.ended == 1)
    daemon.send(ready=1)

    assert await call == "a"
    assert await daemon.next() == {"left": 1}


async def test_the_calls_of_a_mux_that_has_left_do_not_wait_for_a_next_daemon(mux: WaitingMux) -> None:
    """None can find it: they waited half a minute for nothing, and could have been repeated on the successor."""
    daemon = await mux.daemon()
    await daemon.snapshot()
    call = asyncio.create_task(mux.call("a", None))
    assert (await daemon.next())["load"] == [1, "a", None]

    mux.leave()
    assert await daemon.next() == {"stopping": 1.0}
    assert not call.done(), "the daemon can still answer"
    await daemon.end()

    with pytest.raises(Unavailable, match="has ended"):
        async with asyncio.timeout(NEXT_DAEMON_S / 2):
            await call
    with pytest.raises(Unavailable, match="no daemon is connected"):
        await mux.call("a", None)
