"""The daemon's listening sockets of REST, bound or taken over from the previous daemon; a check that its other ports
are free; and `health_port`, for probes without a key or certificate.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from starlette.types import Receive, Scope, Send

from teimgr.config.settings import Settings
from teimgr.http.connection_gate import LIMITS, ConnectionGate, Phase
from teimgr.http.server import Listener, bind, serving
from teimgr.http.unix_listener import UnixListener, bind_unix, check_free

TakeOver = Callable[[str], socket.socket | None]
"""Returns the predecessor's listening socket of this name, or None."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """All listening sockets of REST and `health_port`; `by_name` has them by the names that a successor uses."""

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
    """Take over the predecessor's sockets and bind the others that the settings name.

    At the end, the Unix socket is closed and its file removed. The server closes the other sockets.

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
    """Return the ports and the socket of the muxes and of enrolment, by the names of their settings."""
    found = {}
    if settings.grpc_enabled:
        found["grpc_port"] = str(settings.grpc_port)
        if settings.grpc_socket is not None:
            found["grpc_socket"] = str(settings.grpc_socket.absolute())
    if settings.cluster.address:
        found["cluster.enrolment_port"] = str(settings.cluster.enrolment)
    return found


def try_other_ports(settings: Settings, before: Mapping[str, str] | None) -> None:
    """Check that the ports of the muxes and of enrolment are free, by binding them for a moment.

    `before` are the `other_ports` of the previous daemon. If it is None, muxes of a killed daemon may still listen on
    the gRPC port, which is then shared.

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


MAX_CONNECTIONS = 64
# A probe sends its only request at once, so the time limits can be short.
_LIMIT_S = 5.0
_METHODS = ("GET", "HEAD")

Word = Literal["alive", "ready", "starting", "stopping"]
Ask = Callable[[], Word]
"""Returns the present state of the daemon."""


class HealthPort:
    """The application of `health_port`: /livez is 200 while the daemon runs, /readyz only while it is ready, else 503.

    Kubernetes' kubelet has no client certificate, so with mutual TLS it cannot probe the REST port. The answers tell
    only whether the daemon lives and routes calls, without names, version or reasons.
    """

    def __init__(self, state: Ask) -> None:
        self._answers: Mapping[str, Ask] = {"/livez": lambda: "alive", "/readyz": state}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        ask = self._answers.get(scope["path"])
        if ask is None:
            status, word = 404, "unknown"
        elif scope["method"] not in _METHODS:
            status, word = 405, "refused"
        else:
            word = ask()
            status = 200 if word in ("alive", "ready") else 503
        body = word.encode()
        headers = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body))}
        headers |= {"cache-control": "no-store", "connection": "close"}
        if status == 405:
            headers["allow"] = ", ".join(_METHODS)
        fields = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving_health(sock: socket.socket, state: Ask) -> AsyncIterator[Listener]:
    """Answer probes on a bound socket while the body runs. Raises the errors of `serving`."""
    limits = {phase: replace(limit, seconds=min(limit.seconds, _LIMIT_S)) for phase, limit in LIMITS.items()}
    limits[Phase.ANSWER] = LIMITS[Phase.ANSWER]  # sets the interval of the checks, so it stays
    gate = ConnectionGate(MAX_CONNECTIONS, limits)
    async with serving(HealthPort(state), sock, gate=gate) as listener:
        yield listener
