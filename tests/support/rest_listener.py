"""The REST application on a real listener of a random port, over an in-memory fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import aiohttp
import uvicorn
from tests.support.memory_fleet import Fleet

from teimgr.api.rest.app import create_app, uvicorn_options
from teimgr.config.settings import Settings
from teimgr.control.registry.registry import Registry
from teimgr.http.connection_gate import ConnectionGate
from teimgr.http.http1 import HttpProtocol
from teimgr.http.server import Server, bind
from teimgr.observability.metrics import DaemonMetrics


@dataclass
class Front:
    """A running REST listener, what is behind it, and a client of it."""

    fleet: Fleet
    metrics: DaemonMetrics
    app: Any
    url: str
    alarms: list[str] = field(default_factory=list)
    http: aiohttp.ClientSession = None  # type: ignore[assignment]

    async def call(self, method: str, path: str, status: int, **body: Any) -> Any:
        """The JSON answer to a request, which must have this status."""
        async with self.http.request(method, path, **body) as reply:
            text = await reply.text()
            assert reply.status == status, text
            assert reply.headers["Content-Type"] == "application/json"
            return await reply.json()

    async def create(self, name: str, status: int = 201, **more: Any) -> Any:
        """The answer to POST /instances."""
        return await self.call("POST", "/instances", status, json={"name": name, "model_id": "tiny"} | more)


@asynccontextmanager
async def listening(
    settings: Settings,
    registry: Callable[[Fleet, DaemonMetrics], Registry] | None = None,
    parts: Callable[[Fleet], dict[str, Any]] = lambda fleet: {},
    **fleet: Any,
) -> AsyncIterator[Front]:
    """A front on a free port for as long as the block runs."""
    metrics, alarms, instances = DaemonMetrics(), [], Fleet(settings, **fleet)
    models = registry(instances, metrics) if registry else None
    app = create_app(instances, settings, metrics, lambda: alarms, registry=models, **parts(instances))
    options = {"http": HttpProtocol} | uvicorn_options(settings.tls_files and settings.tls_files.context())
    server = Server(uvicorn.Config(app, lifespan="off", log_config=None, **options), ConnectionGate())
    server.server_state.direct = app.state.direct
    with bind("127.0.0.1", 0) as listener:
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([listener])
        scheme = "https" if settings.tls_files else "http"
        try:
            yield Front(instances, metrics, app, f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", alarms)
        finally:
            await server.shutdown([listener])


def failed(failure: dict[str, Any], code: str) -> str:
    """The sentence of a failure in the one shape."""
    assert set(failure) == {"error", "code", "timestamp"}
    assert failure["code"] == code
    assert failure["timestamp"].endswith("Z")
    datetime.fromisoformat(failure["timestamp"])
    return str(failure["error"])
