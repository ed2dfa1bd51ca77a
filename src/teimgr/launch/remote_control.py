"""The daemon's control links to workers on other hosts: over mutual TLS, with the daemon's own certificate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from teimgr.errors import TeimgrError, Unavailable
from teimgr.fleet_tls import FleetIdentity
from teimgr.launch.control_link import CONNECT_LIMIT_S, ControlLink, WorkerStatus
from teimgr.spec import WorkerEndpoint
from teimgr.wire.frames import FrameType, Method
from teimgr.wire.remote_frames import RemoteAddress, RemoteFrames, connect

_WATCH_ID = 0


class RemoteControlLink(RemoteFrames, ControlLink):
    """As `ControlLink`; a worker of another host that is silent is given up within seconds."""


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
