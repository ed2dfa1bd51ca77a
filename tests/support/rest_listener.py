"""REST on a real socket over a fleet in memory, and the fixtures of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn

from teimgr.api.rest.app import create_app, uvicorn_options
from teimgr.config.settings import Settings
from teimgr.control.registry.registry import Registry
from teimgr.control.supervision.validation import with_changes
from teimgr.errors import (
    AlreadyRunning,
    InstanceExists,
    InstanceNotFound,
    InvalidGpuId,
    MaxInstancesReached,
    NotRunning,
    PortAllocationFailed,
    PortConflict,
)
from teimgr.http.connection_gate import ConnectionGate
from teimgr.http.http1 import HttpProtocol
from teimgr.http.server import Server, bind
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import InstanceSpec, InstanceView, LoadedModel, State, UpdateView, check_name

CREATED_AT = "2026-03-04T12:00:00.123456Z"


class Fleet:
    """Instances by name. A start leaves an instance starting until the test makes it ready."""

    def __init__(self, settings: Settings, gpus: tuple[int, ...] = ()) -> None:
        self.store_alarm: str | None = None
        self._settings = settings
        self._gpus = gpus
        self._views: dict[str, InstanceView] = {}
        self.purged: list[str] = []
        self.on_views_changed: Callable[[list[InstanceView]], None] = lambda views: None

    async def create(self, request: InstanceSpec) -> InstanceView:
        check_name(request.name)
        if request.gpu_id is not None and request.gpu_id not in self._gpus:
            raise InvalidGpuId(request.gpu_id, list(self._gpus))
        if request.name in self._views:
            raise InstanceExists(request.name)
        if self._settings.max_instances is not None and len(self._views) >= self._settings.max_instances:
            raise MaxInstancesReached(self._settings.max_instances)
        spec = replace(
            request,
            port=self._port(request.port),
            prometheus_port=request.prometheus_port or 9100 + len(self._views),
            created_at=CREATED_AT,
        )
        return self.put(InstanceView(spec=spec, state=State.STARTING, pid=4242, uptime_secs=0))

    async def start(self, name: str) -> InstanceView:
        view = self.get(name)
        if view.spec.wanted_running:
            raise AlreadyRunning(name, view.state.value)
        return self.put(replace(view, spec=replace(view.spec, wanted_running=True), state=State.STARTING, pid=4243))

    async def started(self, name: str) -> InstanceView:
        return self.get(name)

    async def stop(self, name: str) -> InstanceView:
        view = self.get(name)
        if not view.spec.wanted_running:
            raise NotRunning(name, view.state.value)
        return self.put(replace(view, spec=replace(view.spec, wanted_running=False), state=State.STOPPED, pid=None))

    async def restart(self, name: str, *, rolling: bool = False, wait: bool = False) -> InstanceView:
        view = self.get(name)
        if rolling:
            return self.put(replace(view, update=UpdateView(state="done" if wait else "rolling")))
        return self.put(replace(view, state=State.STARTING, restarts=view.restarts + 1))

    async def update(
        self, name: str, changes: Mapping[str, Any], *, recreate: bool = False, wait: bool = False
    ) -> InstanceView:
        view = self.get(name)
        update = UpdateView(state="done" if wait else "rolling", changes=tuple(sorted(changes)))
        return self.put(replace(view, spec=with_changes(view.spec, changes), update=update))

    async def delete(self, name: str, *, purge: bool = False) -> InstanceView:
        view = self.get(name)
        if purge:
            self.purged.append(name)
        del self._views[name]
        self.on_views_changed(self.list())
        return view

    async def recreate(self, request: InstanceSpec) -> InstanceView:
        await self.delete(request.name)
        return await self.create(request)

    def list(self) -> list[InstanceView]:
        return list(self._views.values())

    def get(self, name: str) -> InstanceView:
        if name not in self._views:
            raise InstanceNotFound(name)
        return self._views[name]

    def replicas(self, spec: InstanceSpec) -> int:
        return spec.replicas if isinstance(spec.replicas, int) else max(1, len(self._gpus))

    def planned_workers(self, name: str) -> int:
        return self.replicas(self.get(name).spec)

    def put(self, view: InstanceView) -> InstanceView:
        """Make this the view of its instance."""
        self._views[view.spec.name] = view
        self.on_views_changed(self.list())
        return view

    def declare(self, count: int, **keys: Any) -> None:
        """Have this many instances on demand whose models are not loaded, with these keys."""
        for number in range(count):
            spec = InstanceSpec(name=f"declared-{number}", model_id=f"org/{number}", load="on_demand", **keys)
            self._views[spec.name] = InstanceView(spec=spec, state=State.UNLOADED)
        self.on_views_changed(self.list())

    def ready(self, name: str) -> None:
        """The worker of `name` proved itself."""
        self.put(replace(self.get(name), state=State.RUNNING, model=MODEL, threads=2))

    def fail(self, name: str, reason: str) -> None:
        """The worker of `name` cannot run."""
        self.put(replace(self.get(name), state=State.FAILED, pid=None, reason=reason))

    def _port(self, wanted: int) -> int:
        taken = {view.spec.port: view.spec.name for view in self._views.values()}
        if wanted:
            if wanted in taken:
                raise PortConflict(wanted, f"instance '{taken[wanted]}'")
            return wanted
        for port in range(self._settings.instance_port_start, self._settings.instance_port_end):
            if port not in taken:
                return port
        raise PortAllocationFailed("the range is used up")


MODEL = LoadedModel(
    model_id="tiny",
    model_sha=None,
    dtype="float32",
    device="cpu",
    kind="embedding",
    pooling="mean",
    dimension=384,
    max_input_length=512,
    max_batch_tokens=16384,
    batching="packed",
)


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


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_file=tmp_path / "state.toml", max_instances=10)


@pytest.fixture
async def front(settings: Settings) -> AsyncIterator[Front]:
    async with listening(settings) as front, aiohttp.ClientSession(front.url) as front.http:
        yield front
