"""The daemon's control links to workers and muxes on other hosts: over mutual TLS, with the daemon's certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from teimgr.control.launch.control_link import CONNECT_LIMIT_S, ControlLink, MuxLink, MuxLost, WorkerStatus
from teimgr.errors import TeimgrError, Unavailable
from teimgr.spec import WorkerEndpoint
from teimgr.wire.fleet_tls import FleetIdentity, FleetName, peer_of
from teimgr.wire.frames import FrameType, Method
from teimgr.wire.json_messages import MAX_MUX_LINE_BYTES, read_line, write_line
from teimgr.wire.remote_frames import RemoteAddress, RemoteFrames, WrongPeer, connect, set_tcp_limits

_WATCH_ID = 0
_RETRY_PAUSE_S = 0.25


class RemoteControlLink(RemoteFrames, ControlLink):
    """Like `ControlLink`; a worker of another host that is silent is given up within seconds."""

    ends_when_revoked = False  # the workers of a removed host are ended over it


async def open_control_link(
    endpoint: WorkerEndpoint,
    identity: FleetIdentity | None,
    on_status: Callable[[WorkerStatus], None],
    on_lost: Callable[[], None],
) -> ControlLink:
    """Connect to a worker and watch its status: by its unix socket on this host, over TLS on another one.

    `identity` has the daemon's certificate; workers refuse control commands of others.

    Raises:
        Unavailable: no connection within `CONNECT_LIMIT_S`, or not to this incarnation.
    """
    if endpoint.is_on(identity.node if identity else ""):
        return await ControlLink.open(Path(endpoint.socket), on_status, on_lost)
    if identity is None:
        raise Unavailable("no connection to the worker: this process has no identity in the fleet")
    address = RemoteAddress.parse(endpoint.address, endpoint.node, endpoint.incarnation)
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            link = await connect(lambda: RemoteControlLink(on_status, on_lost), address, identity)
    except (OSError, TeimgrError) as error:  # TimeoutError is an OSError
        raise Unavailable(f"no connection to the worker: {str(error) or 'no answer'}") from error
    link.send(FrameType.REQUEST, Method.WATCH, _WATCH_ID)
    return link


async def open_mux_link(address: RemoteAddress, identity: FleetIdentity, limit_s: float) -> MuxLink:
    """Connect to a mux of another host, which is tried again until it answers.

    Raises:
        MuxLost: no connection within `limit_s`, or not to this incarnation.
    """
    problem = "it does not come up"
    try:
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    return MuxLink(*await _greet(address, identity))
                except (OSError, ValueError, TeimgrError) as error:
                    problem = str(error) or type(error).__name__
                await asyncio.sleep(_RETRY_PAUSE_S)
    except TimeoutError:
        raise MuxLost(f"its control port on host {address.node} cannot be reached: {problem}") from None


async def _greet(address: RemoteAddress, identity: FleetIdentity) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose other end has proved that it is the mux that is expected. Raises OSError, TeimgrError."""
    reader, writer = await asyncio.open_connection(
        address.host, address.port, ssl=identity.client_context(), limit=MAX_MUX_LINE_BYTES
    )
    try:
        set_tcp_limits(writer.transport)
        peer = peer_of(writer.get_extra_info("ssl_object"))
        if peer.name != FleetName(address.node):
            raise WrongPeer(f"the certificate is that of {peer.name.uri}, not of node '{address.node}'")
        write_line(writer, hello=address.incarnation)
        answer = await read_line(reader) or {}
        if answer.get("hello") != address.incarnation:
            raise WrongPeer(str(answer.get("error", "it closed the connection")))
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer
