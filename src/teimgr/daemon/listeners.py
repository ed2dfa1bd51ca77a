"""The daemon's listening sockets of REST, which it binds or takes over from the daemon before it; a try of its other
ports.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from teimgr.config.settings import Settings
from teimgr.http.server import bind
from teimgr.http.unix_listener import UnixListener, bind_unix, check_free

TakeOver = Callable[[str], socket.socket | None]
"""The socket of this name that a predecessor listens on, or None."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Those of REST, of its further ports and of single settings; `by_name` has all, as a successor asks for them."""

    rest: socket.socket
    health: socket.socket | None
    more: tuple[socket.socket, ...]
    unix: UnixListener | None
    by_name: dict[str, socket.socket]

    def keep_files(self) -> None:
        """Leave the file of the Unix socket to a successor, which listens on the same socket."""
        if self.unix is not None:
            self.unix.file.keep()


@contextmanager
def open_listeners(settings: Settings, take_over: TakeOver = lambda name: None) -> Iterator[Listeners]:
    """Bind what the settings name and no predecessor listens on. The Unix socket is closed at the end, and its file
    removed; the others are the server's to close.

    Raises:
        PortConflict, InvalidConfig: an address cannot be bound.
    """
    by_name: dict[str, socket.socket] = {}

    def tcp(key: str, port: int) -> socket.socket:
        name = f"{key} {settings.api_host}:{port}"
        by_name[name] = take_over(name) or bind(settings.api_host, port, key)
        return by_name[name]

    rest = tcp("api_port", settings.api_port)
    more = tuple(tcp("ollama_port", port) for port in (settings.ollama_port,) if port is not None)
    health = None if settings.health_port is None else tcp("health_port", settings.health_port)
    with ExitStack() as open_:
        unix = None
        if settings.api_socket is not None:
            path = settings.api_socket.absolute()
            name = f"api_socket {path}"
            if (sock := take_over(name)) is not None:
                unix = UnixListener(sock, path)
            else:
                unix = bind_unix(path, settings.socket_permissions, "api_socket")
            open_.callback(unix.close)
            by_name[name] = unix.sock
        yield Listeners(rest, health, more, unix, by_name)


def other_ports(settings: Settings) -> dict[str, str]:
    """Where muxes and enrolment listen, by the keys."""
    found = {}
    if settings.grpc_enabled:
        found["grpc_port"] = str(settings.grpc_port)
        if settings.grpc_socket is not None:
            found["grpc_socket"] = str(settings.grpc_socket.absolute())
    if settings.cluster.address:
        found["cluster.enrolment_port"] = str(settings.cluster.enrolment)
    return found


def try_other_ports(settings: Settings, before: Mapping[str, str] | None) -> None:
    """Bind for a moment what muxes and enrolment will listen on, while the daemon before this one still serves.

    `before` are its `other_ports`, None if they are not known: then the gRPC port may be that of its muxes, which live
    on if it was killed, and share it.

    Raises:
        PortConflict, InvalidConfig: a port cannot be bound.
    """
    wanted = other_ports(settings)
    if (port := wanted.get("grpc_port")) is not None:
        is_shared = before is None or before.get("grpc_port") == port
        bind(settings.grpc_host, int(port), "grpc_port", is_shared=is_shared).close()
    if before is None:
        return
    if (path := wanted.get("grpc_socket")) is not None and path != before.get("grpc_socket"):
        check_free(Path(path), "grpc_socket")
    if (port := wanted.get("cluster.enrolment_port")) is not None and port != before.get("cluster.enrolment_port"):
        bind(settings.cluster.host, int(port), "cluster.enrolment_port").close()
