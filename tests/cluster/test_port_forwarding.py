"""Instance ports of other hosts on the head: bytes over real TLS, choice of hosts, bounds, and what breaks off."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

import pytest
from tests.support.cluster import HOST, NAME, Forwarding, TcpProxy, forwarding
from tests.support.fleet import local_launcher
from tests.support.polling import eventually, on_uvloop

from teimgr.cluster import port_forwarding
from teimgr.cluster.host_link import HostAddress, connect
from teimgr.cluster.port_forwarding import PortForwarding
from teimgr.errors import Forbidden, Unavailable
from teimgr.http import connection_gate
from teimgr.http.connection_gate import Phase, PhaseLimit
from teimgr.spec import State
from teimgr.worker.connection_queue import ConnectionQueue

LIMIT_S = 30.0
LARGE = 8 << 20
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def asked(streams: Streams, text: bytes = b"hello") -> bytes:
    """What an echo sends back."""
    reader, writer = streams
    writer.write(text)
    async with asyncio.timeout(LIMIT_S):
        return await reader.readexactly(len(text))


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection's end, however it ends."""
    found = bytearray()
    try:
        async with asyncio.timeout(LIMIT_S):
            while data := await reader.read(1 << 16):
                found += data
    except ConnectionResetError:
        found += b"<reset>"
    return bytes(found)


async def refused(fleet: Forwarding) -> bool:
    """Whether a connection that says something is reset, be it before this side has noticed it."""
    try:
        reader, writer = await fleet.connect()
    except ConnectionResetError:
        return True
    writer.write(b"hello")
    return await ended(reader) == b"<reset>"


async def closed(fleet: Forwarding) -> bool:
    """Whether a connection is closed without an answer, before or after its first bytes."""
    try:
        reader, _ = await fleet.connect()
    except ConnectionResetError:
        return True
    return await ended(reader) in (b"", b"<reset>")


@on_uvloop
async def test_bytes_go_both_ways_and_the_end_of_one_leaves_the_other_open(tmp_path: Path) -> None:
    async def answer_after_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whole = await reader.read(-1)
        writer.write(whole[::-1])
        writer.close()

    async with forwarding(tmp_path, "two", handler=answer_after_the_end) as fleet, asyncio.timeout(LIMIT_S):
        fleet.route("two")
        await fleet.listening()
        reader, writer = await fleet.connect()
        sent = os.urandom(LARGE)
        writer.write(sent)
        writer.write_eof()

        assert await reader.read(-1) == sent[::-1]
        writer.close()
        await eventually(lambda: fleet.head.connections == 0)


@on_uvloop
async def test_what_is_echoed_while_it_is_sent_is_complete(tmp_path: Path) -> None:
    async with forwarding(tmp_path, "two") as fleet, asyncio.timeout(LIMIT_S):
        fleet.route("two")
        await fleet.listening()
        reader, writer = await fleet.connect()
        sent = os.urandom(LARGE)

        async def send() -> None:
            for start in range(0, LARGE, 10_000):
                writer.write(sent[start : start + 10_000])
                await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        assert await reader.read(-1) == sent
        await sending
        writer.close()


@on_uvloop
async def test_connections_go_to_the_host_with_the_fewest(tmp_path: Path) -> None:
    async with forwarding(tmp_path, "two", "three") as fleet:
        fleet.route("two", "three")
        await fleet.listening()
        opened = [await fleet.connect() for _ in range(6)]
        assert {await asked(each) for each in opened} == {b"hello"}
        assert {host.connections for host in fleet.hosts.values()} == {3}

        for _, writer in opened[::2]:  # all of one host, by the alternation
            writer.close()
        await eventually(lambda: fleet.head.connections == 3)
        again = [await fleet.connect() for _ in range(3)]
        for each in again:
            await asked(each)
        assert sorted(host.connections for host in fleet.hosts.values()) == [3, 6]


@on_uvloop
async def test_a_host_that_refuses_costs_the_client_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with forwarding(tmp_path, "two", "three") as fleet:
        fleet.route("two", "three")
        await fleet.listening()
        await fleet.hosts["two"].listener.close()  # its agent was killed
        with caplog.at_level(logging.WARNING):
            for _ in range(4):
                assert await asked(await fleet.connect()) == b"hello"
        assert [each.node for each in caplog.records if each.message == "connections are not forwarded"] == ["two"]


@on_uvloop
async def test_a_host_that_is_gone_refuses_at_once_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with forwarding(tmp_path, "two") as fleet:
        fleet.route("two")
        await fleet.listening()
        await fleet.hosts["two"].listener.close()

        assert await refused(fleet)
        (record,) = [each for each in caplog.records if each.message == "connections are not forwarded"]
        assert (record.instance, record.node) == (NAME, "two")


@on_uvloop
async def test_a_host_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_forwarding, "CONNECT_LIMIT_S", 0.3)
    async with forwarding(tmp_path, "two") as fleet, TcpProxy(fleet.hosts["two"].address) as network:
        fleet.move("two", network.address)
        network.freeze()
        fleet.route("two")
        await fleet.listening()

        assert await refused(fleet)


@on_uvloop
async def test_another_host_at_the_address_gets_no_byte(tmp_path: Path) -> None:
    async with forwarding(tmp_path, "two", "three") as fleet:
        fleet.move("two", fleet.hosts["three"].address)
        fleet.route("two")
        await fleet.listening()

        reader, writer = await fleet.connect()
        writer.write(b"secret")

        assert await ended(reader) == b"<reset>"
        assert fleet.hosts["three"].connections == 0


@on_uvloop
async def test_a_broken_link_resets_the_client_and_ends_the_workers_connection(tmp_path: Path) -> None:
    async with forwarding(tmp_path, "two") as fleet, TcpProxy(fleet.hosts["two"].address) as network:
        fleet.move("two", network.address)
        fleet.route("two")
        await fleet.listening()
        streams = await fleet.connect()
        assert await asked(streams) == b"hello"

        network.cut()

        assert await ended(streams[0]) == b"<reset>"
        await eventually(lambda: fleet.hosts["two"].open_connections == 0)


@on_uvloop
async def test_a_worker_that_ends_resets_its_clients_and_the_next_one_is_connected(tmp_path: Path) -> None:
    async with forwarding(tmp_path, "two") as fleet:
        fleet.route("two")
        await fleet.listening()
        streams = await fleet.connect()
        assert await asked(streams) == b"hello"

        await fleet.hosts["two"].stop_worker()
        fleet.route(state=State.STARTING)

        await ended(streams[0])
        await fleet.refusing()
        await fleet.hosts["two"].start_worker()
        fleet.route("two")
        await fleet.listening()
        assert await asked(await fleet.connect()) == b"hello"


@on_uvloop
async def test_without_a_replica_elsewhere_the_port_is_closed_and_calls_end_first(tmp_path: Path) -> None:
    async with forwarding(tmp_path, "two") as fleet:
        fleet.route(state=State.STARTING)
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            await fleet.connect()
        fleet.route("two")
        await fleet.listening()
        streams = await fleet.connect()
        assert await asked(streams) == b"hello"

        fleet.route(state=State.STOPPING)
        await fleet.refusing()
        assert await asked(streams, b"more") == b"more"  # the worker drains, and ends it

        fleet.route(state=State.STOPPED)
        assert await ended(streams[0]) == b"<reset>"


@on_uvloop
async def test_a_deleted_instance_ends_at_once_and_its_port_can_be_bound(tmp_path: Path) -> None:
    async with forwarding(tmp_path, "two") as fleet:
        fleet.route("two")
        await fleet.listening()
        streams = await fleet.connect()
        assert await asked(streams) == b"hello"

        fleet.directory.remove(NAME)

        with socket.socket() as next_one:
            next_one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            next_one.bind((HOST, fleet.port))
            next_one.listen()
        assert await ended(streams[0]) == b"<reset>"


@on_uvloop
async def test_a_lost_host_loses_its_connections_and_one_that_comes_back_is_forwarded_to(tmp_path: Path) -> None:
    async with forwarding(tmp_path, "two") as fleet:
        fleet.route("two")
        await fleet.listening()
        streams = await fleet.connect()
        assert await asked(streams) == b"hello"

        known = fleet.known.now
        fleet.known.set({})
        await fleet.refusing()
        assert await asked(streams) == b"hello"  # it has its route

        fleet.route(state=State.STARTING)
        assert await ended(streams[0]) == b"<reset>"
        fleet.known.set(known)
        fleet.route("two")
        await fleet.listening()
        assert await asked(await fleet.connect()) == b"hello"


@on_uvloop
async def test_the_port_of_another_process_is_left_to_it_and_taken_when_it_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with forwarding(tmp_path, "two") as fleet:
        with socket.create_server((HOST, fleet.port)):
            fleet.route("two")
            await eventually(lambda: "the port is not forwarded" in caplog.text)

        await eventually(lambda: "the port is forwarded" in [each.message for each in caplog.records])
        assert await asked(await fleet.connect()) == b"hello"


class LocalWorker:
    """A worker of the head: it shares the sockets that a launch of it would get."""

    def __init__(self, fleet: Forwarding) -> None:
        self.sockets = fleet.local._joined[NAME].copies()
        self._listener = self.sockets[fleet.port]
        self.answered = 0

    async def serve(self) -> asyncio.Server:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.answered += 1
            await reader.read(1)
            writer.write(b"here")
            writer.close()

        return await asyncio.start_server(answer, sock=self._listener)


@on_uvloop
async def test_no_connection_is_lost_when_a_replica_here_takes_over_and_when_it_ends(tmp_path: Path) -> None:
    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"there")
        writer.close()

    async with forwarding(tmp_path, "two", handler=tell) as fleet:
        fleet.route("two")
        await fleet.listening()
        answers: list[bytes] = []
        is_over = asyncio.Event()

        async def call() -> None:
            while not is_over.is_set():
                reader, writer = await fleet.connect()
                writer.write(b"?")
                answers.append(await ended(reader))
                writer.close()

        calling = [asyncio.create_task(call()) for _ in range(4)]

        async def more(kind: bytes) -> None:
            known = len(answers)
            await eventually(lambda: kind in answers[known:])

        await more(b"there")
        worker = LocalWorker(fleet)
        server = await worker.serve()
        fleet.route("two", "one")
        await more(b"here")
        await eventually(lambda: b"there" not in answers[-50:] and len(answers) > 50)
        server.close()  # killed: its socket closes before its route goes
        between = await fleet.connect()
        between[1].write(b"?")
        fleet.route("two")
        assert await ended(between[0]) == b"there"
        await more(b"there")
        is_over.set()
        await asyncio.gather(*calling)

        assert set(answers) == {b"there", b"here"}
        for sock in worker.sockets.values():
            sock.close()


@on_uvloop
async def test_a_connection_that_an_ending_worker_here_passes_on_is_forwarded(tmp_path: Path) -> None:
    async with forwarding(tmp_path, "two") as fleet:
        fleet.route("two")
        await fleet.listening()
        worker = LocalWorker(fleet)
        fleet.route("two", "one")
        reader, writer = await fleet.connect()
        listener = worker.sockets[fleet.port]
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        fleet.route("two")
        queue = ConnectionQueue(worker.sockets)
        queue.pass_on(fleet.port, connection)

        assert await asked((reader, writer)) == b"hello"
        queue.close()
        listener.close()


def passed_on(fleet: Forwarding, folder: Path) -> PortForwarding:
    """A second daemon's part, with the listening sockets of the first one's, which accepts no more."""
    sockets = {name: sock.dup() for name, sock in fleet.head.listeners().items()}
    fleet.head.hand_over()
    successor = fleet.forwarder(local_launcher(folder))
    successor.inherit(lambda prefix: {name.removeprefix(prefix): sock for name, sock in sockets.items()})
    return successor


@on_uvloop
async def test_clients_wait_for_the_next_daemon_and_connections_end_with_the_one_before(tmp_path: Path) -> None:
    async with forwarding(tmp_path, "two") as fleet:
        fleet.route("two")
        await fleet.listening()
        kept = await fleet.connect()
        assert await asked(kept) == b"hello"

        successor = passed_on(fleet, tmp_path / "next")
        waiting = asyncio.create_task(asked(await fleet.connect()))
        assert await asked(kept, b"more") == b"more"
        successor.start()

        assert await waiting == b"hello"
        assert (fleet.head.connections, successor.connections) == (1, 1)
        kept[1].close()
        await fleet.head.finished(LIMIT_S)
        assert fleet.head.connections == 0
        await successor.close()


@on_uvloop
async def test_the_next_daemon_closes_ports_whose_replicas_do_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_forwarding, "_INHERITED_S", 0.1)
    async with forwarding(tmp_path, "two") as fleet:
        fleet.route("two")
        await fleet.listening()
        successor = passed_on(fleet, tmp_path / "next")
        fleet.route(state=State.FAILED)
        await fleet.head.close()
        successor.start()

        await fleet.refusing()
        await successor.close()


@on_uvloop
async def test_only_a_replica_here_is_no_business_of_the_head(tmp_path: Path) -> None:
    async with forwarding(tmp_path, "two") as fleet:
        fleet.route("two")
        await fleet.listening()
        fleet.route("one")
        await fleet.refusing()


@on_uvloop
async def test_connections_over_the_limit_are_reset_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(port_forwarding, "MAX_OF_INSTANCE", 2)
    async with forwarding(tmp_path, "two") as fleet:
        fleet.route("two")
        await fleet.listening()
        kept = [await fleet.connect(), await fleet.connect()]
        for each in kept:
            await asked(each)
        for _ in range(3):
            assert await closed(fleet)
        assert caplog.text.count("too many connections") == 1
        kept.pop()[1].close()
        await eventually(lambda: fleet.head.connections == 1)
        assert await asked(await fleet.connect()) == b"hello"
        assert await asked(kept[0]) == b"hello"


@on_uvloop
async def test_silent_clients_cost_other_hosts_nothing_and_make_room_for_one_that_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_forwarding, "MAX_OF_INSTANCE", 3)
    async with forwarding(tmp_path, "two") as fleet:
        fleet.route("two")
        await fleet.listening()
        served = await fleet.connect()
        assert await asked(served) == b"hello"
        silent = [await fleet.connect() for _ in range(8)]

        for _ in range(3):
            assert await asked(await fleet.connect()) == b"hello"
            fleet.writers[-1].transport.abort()
            await eventually(lambda: fleet.hosts["two"].open_connections == 1)
        assert fleet.hosts["two"].connections == 4
        assert fleet.head.connections <= 3
        assert await asked(served) == b"hello"
        assert await ended(silent[0][0]) in (b"", b"<reset>")


@on_uvloop
async def test_a_silent_client_is_closed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {**connection_gate.LIMITS, Phase.HEAD: PhaseLimit(0.2)}
    monkeypatch.setattr(connection_gate, "LIMITS", limits)
    async with forwarding(tmp_path, "two") as fleet:
        fleet.route("two")
        await fleet.listening()
        served = await fleet.connect()
        assert await asked(served) == b"hello"
        silent = await fleet.connect()

        assert await ended(silent[0]) in (b"", b"<reset>")
        await eventually(lambda: fleet.head.connections == 1)
        assert fleet.hosts["two"].connections == 1
        assert await asked(served) == b"hello"


@on_uvloop
async def test_a_client_that_does_not_read_stops_the_worker_and_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    monkeypatch.setattr(port_forwarding, "STALL_S", 1.0)
    async with forwarding(tmp_path, "two", handler=flood) as fleet:
        fleet.route("two")
        await fleet.listening()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, (HOST, fleet.port))
            client.send(b"?")
            await eventually(lambda: fleet.head.connections == 1 and sent > 0)
            await eventually(lambda: fleet.head.connections == 0)
            await eventually(lambda: fleet.hosts["two"].open_connections == 0)
        assert sent < 64 << 20  # the kernel's buffers of three connections, and little of ours


@on_uvloop
async def test_others_than_the_daemon_are_refused_and_unknown_workers_too(tmp_path: Path) -> None:
    async with forwarding(tmp_path, "two") as fleet:
        host = HostAddress("two", fleet.hosts["two"].address)
        for node, worker, error in (("three", "two-1", Forbidden), ("", "two-2", Unavailable)):
            link = await connect(host, fleet.nodes.identity(node))
            await link.send(op="forward", workers=[worker])
            with pytest.raises(error):
                await link.receive()
            await link.close()
        assert fleet.hosts["two"].connections == 0
