"""The listener of `health_port`, for probes without key or certificate: GET /livez and GET /readyz, one word each.

Kubernetes' kubelet has no client certificate, so with mutual TLS it cannot ask the REST port. A client of this port
learns whether the daemon lives and routes calls, and nothing else: neither names, version nor reasons.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Literal

from starlette.types import Receive, Scope, Send

from teimgr.http.connection_gate import LIMITS, ConnectionGate, Phase
from teimgr.http.server import Listener, serving

MAX_CONNECTIONS = 64
# A probe sends its request at once, and each connection has one.
_LIMIT_S = 5.0
_METHODS = ("GET", "HEAD")

Word = Literal["alive", "ready", "starting", "stopping"]
Ask = Callable[[], Word]
"""What the daemon does now."""


class HealthPort:
    """The ASGI application: /livez is 200 while the daemon runs, /readyz only while it is ready, else 503."""

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
    """Answer probes on a bound socket while the body runs; errors as `serving`."""
    limits = {phase: replace(limit, seconds=min(limit.seconds, _LIMIT_S)) for phase, limit in LIMITS.items()}
    limits[Phase.ANSWER] = LIMITS[Phase.ANSWER]  # how often a connection is looked at
    gate = ConnectionGate(MAX_CONNECTIONS, limits)
    async with serving(HealthPort(state), sock, gate=gate) as listener:
        yield listener
