"""Connections that workers of an instance pass to each other."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

from teimgr.worker.connection_queue import ConnectionQueue


async def test_more_connections_than_the_queue_holds_reach_the_workers_that_serve() -> None:
    with closing(ConnectionQueue({})) as leaves:
        copies = {name: sock.dup() for name, sock in leaves.ends.items()}
        with closing(ConnectionQueue(copies)) as stays:
            here: list[socket.socket] = []
            leaves.serve(lambda port, connection: here.append(connection))
            leaves.leave()
            pairs = [socket.socketpair() for _ in range(400)]
            for number, (_, theirs) in enumerate(pairs):
                leaves.pass_on(8000 + number, theirs)
            found: dict[int, socket.socket] = {}
            everything = asyncio.Event()

            def take(port: int, connection: socket.socket) -> None:
                found[port] = connection
                if len(found) == len(pairs):
                    everything.set()

            stays.serve(take)
            async with asyncio.timeout(30):
                await everything.wait()

            assert here == []
            for number, (ours, theirs) in enumerate(pairs):
                assert theirs.fileno() == -1
                found[8000 + number].sendall(b"%d" % number)
                assert ours.recv(16) == b"%d" % number
                ours.close()
                found[8000 + number].close()


async def test_those_that_wait_when_the_sender_has_ended_are_taken() -> None:
    with closing(ConnectionQueue({})) as leaves:
        pairs = [socket.socketpair() for _ in range(400)]
        for number, (_, theirs) in enumerate(pairs):
            leaves.pass_on(number, theirs)
        assert leaves.is_sending, "it is told that they have not all left"
        found: dict[int, socket.socket] = {}
        leaves.take_last(found.__setitem__)

        assert len(found) >= 100
        assert [*found] == [*range(len(found))]
        for number, (ours, _) in enumerate(pairs):
            ours.close()
            if number in found:
                found[number].close()


async def test_connections_that_nobody_took_are_closed_with_the_queue() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        queue = ConnectionQueue({})
        queue.pass_on(8080, theirs)
        queue.close()

        assert ours.recv(1) == b""
