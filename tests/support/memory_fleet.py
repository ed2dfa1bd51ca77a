"""An in-memory stand-in for `Manager`: real specs, views and refusals, and no processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from teimgr.config.settings import Settings
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
from teimgr.spec import InstanceSpec, InstanceView, LoadedModel, State, UpdateView, check_name

CREATED_AT = "2026-03-04T12:00:00.123456Z"


class Fleet:
    """Instances by name. A start leaves an instance starting until the test makes it ready."""

    def __init__(self, settings: Settings, gpus: tuple[int, ...] = ()) -> None:
        self.store_alarm: str | None = None
        self._settings = settings
        self._gpus = gpus
        self._views: dict[str, InstanceView] = {}
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

    async def delete(self, name: str) -> InstanceView:
        view = self.get(name)
        del self._views[name]
        self.on_views_changed(self.list())
        return view

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
