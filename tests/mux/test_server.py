"""The end of the mux's listeners, for connections whose TLS handshake is under way."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import h2.events
from tests.support.credentials import Authority, needs_openssl
from tests.support.http_peers import LIMIT_S, Peer, head

from teimgr.http.auth.tls_files import TlsFiles
from teimgr.http.http2.connection import Connection
from teimgr.http.http2.stream import Stream
from teimgr.http.server import bind
from teimgr.mux.server import GrpcServer, tls_context


@needs_openssl
async def test_a_handshake_that_ends_after_the_stop_began_is_told_to_go_and_after_it_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    files = TlsFiles(*authority.sign("server"))
    asked, release = asyncio.Event(), asyncio.Event()

    async def serve(stream: Stream) -> None:
        asked.set()
        await release.wait()
        await stream.send_headers([(b":status", b"200")], end=True)

    server = GrpcServer(lambda state, ticket: Connection(serve, state, ticket, stays_open=True), tls_context(files))
    sock = bind("127.0.0.1", 0)
    address = sock.getsockname()
    server.add(sock)
    await server.start()
    client = ssl.create_default_context(cafile=authority.ca)
    client.check_hostname = False
    client.set_alpn_protocols(["h2"])

    async with AsyncExitStack() as stack, asyncio.timeout(LIMIT_S):

        def connected() -> socket.socket:
            raw = stack.enter_context(socket.create_connection(address))
            raw.setblocking(False)
            return raw

        async def secured(raw: socket.socket) -> Peer:
            peer = Peer(*await asyncio.open_connection(sock=raw, ssl=client, server_hostname="localhost"))
            stack.callback(peer.writer.close)
            return peer

        late, too_late = connected(), connected()
        first = await secured(connected())  # connections are accepted in their order
        first.open(head("/any"), end=True)
        await asked.wait()

        stop = asyncio.create_task(server.stop(LIMIT_S))
        await first.until(h2.events.ConnectionTerminated)
        told = await (await secured(late)).until(h2.events.ConnectionTerminated)
        assert told.last_stream_id == 0
        assert not stop.done()

        release.set()
        await stop
        assert server._state.total_requests == 1
        try:
            answer = await (await secured(too_late)).reader.read()
        except ConnectionError:
            answer = b""
        assert not answer
