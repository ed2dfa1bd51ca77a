"""Hosts and GPUs: GET /hosts, GET /gpus, metrics of GPUs, and membership (/hosts/tokens, DELETE /hosts/{name})."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from teimgr.api.rest.schemas import ANY_FAILURE, Card, Failure, StrictQueryRoute, Text, answer, read_json
from teimgr.control.placement.hosts import Gpu, InventorySource
from teimgr.errors import ObjectNotFound, Unsupported
from teimgr.observability import catalogue
from teimgr.observability.catalogue import Family
from teimgr.observability.exposition import Page, add
from teimgr.spec import InstanceView

router = APIRouter(tags=["hosts"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

LIFE_SECS = 3600.0


class HostEnrolment(Protocol):
    """Controls which hosts may join the cluster."""

    async def join_token(self, node: str | None, life_s: float) -> str:
        """A token by which one host may join, once; only under the name `node`, if that is given.

        Raises:
            ValidationError: the name, the life, or the number of unused tokens exceeds its limit.
            StorageFull, StateNotSaved: it cannot be recorded.
        """

    async def remove_host(self, name: str) -> bool:
        """Revoke a host's certificates; False if it is not in the fleet. Raises StorageFull, StateNotSaved."""


class JoinTokenRequest(BaseModel):
    """Body of POST /hosts/tokens."""

    model_config = ConfigDict(strict=True, extra="forbid", json_schema_extra={"examples": [{"node": "two"}]})

    node: Text | None = Field(None, description="the only host name that it admits; such a token may replace a host")
    life_secs: float = Field(LIFE_SECS, description="validity, at most 7 days")


class JoinTokenInfo(BaseModel):
    """A token for `teimgr node join`. The daemon does not store it."""

    token: str
    node: str | None
    life_secs: float


class RemovedHost(BaseModel):
    """A host that was removed from the fleet."""

    name: str


def _enrolment_of(request: Request) -> HostEnrolment | None:
    enrolment: HostEnrolment | None = request.app.state.enrolment
    return enrolment


_NO_CLUSTER: dict[int | str, dict[str, Any]] = {501: {"model": Failure, "description": "the fleet has one host"}}
EnrolmentDep = Annotated[HostEnrolment | None, Depends(_enrolment_of)]


@router.post("/hosts/tokens", response_model=JoinTokenInfo, status_code=201, responses=_NO_CLUSTER)
async def create_join_token(request: Request, enrolment: EnrolmentDep) -> Response:
    """A token by which one host may join the cluster, once."""
    body = await read_json(request, JoinTokenRequest)
    token = await _present(enrolment).join_token(body.node, body.life_secs)
    return answer({"token": token, "node": body.node, "life_secs": body.life_secs}, 201)


@router.delete("/hosts/{name}", response_model=RemovedHost, responses={404: {"model": Failure}, **_NO_CLUSTER})
async def remove_host(name: str, enrolment: EnrolmentDep) -> Response:
    """Revoke a host's certificates. It takes no more workers, and those of other hosts refuse it; its own are moved,
    where they can run elsewhere.
    """
    if not await _present(enrolment).remove_host(name):
        raise ObjectNotFound("host", name)
    return answer({"name": name})


def _present(enrolment: HostEnrolment | None) -> HostEnrolment:
    if enrolment is None:
        raise Unsupported("This fleet has one host: the daemon has no [cluster] address")
    return enrolment


gpu_router = APIRouter(tags=["gpus"], responses=ANY_FAILURE, route_class=StrictQueryRoute)

_GAUGES: dict[Family, Callable[[Gpu], float | None]] = {
    catalogue.GPU_MEMORY_USED: lambda gpu: gpu.memory_used_bytes,
    catalogue.GPU_UTILIZATION: lambda gpu: gpu.utilization,
    catalogue.GPU_TEMPERATURE: lambda gpu: gpu.temperature_c,
    catalogue.GPU_POWER: lambda gpu: gpu.power_w,
}


class OnGpu(BaseModel):
    """A worker process on a GPU."""

    name: str
    pid: int
    memory_bytes: int | None = Field(description="GPU memory of the process; null if not reported by the driver")


class GpuInfo(Card):
    """A GPU and the workers on it."""

    instances: list[OnGpu]


class Gpus(BaseModel):
    """The GPUs that instances may use; `reason` explains an empty list."""

    gpus: list[GpuInfo]
    reason: str


class HostInfo(BaseModel):
    """A host of a cluster, with its live workers."""

    name: str = Field(description="the value for `node`")
    address: str = Field(description="address in Ray; empty until it has joined")
    cores: int
    memory_total_bytes: int
    memory_free_bytes: int
    labels: dict[str, str]
    versions: dict[str, str] = Field(description="of teimgr, ray, python and torch; hosts in use have equal versions")
    disk_free_bytes: int | None = Field(description="free disk space of the hub's cache")
    clock_ahead_s: float | None = Field(description="its clock minus the head's, in seconds; null if unknown")
    gpus: int
    workers: int
    mux: str | None = Field(description="serving, starting, leaving or a problem; null if the host has no mux")
    problem: str | None = Field(description="why it accepts no workers, or null")


class Hosts(BaseModel):
    """The hosts of the cluster; empty in a fleet of one host."""

    hosts: list[HostInfo]


class GpuReport:
    """GPUs with their workers. `views` returns the current instances, `muxes` the states of muxes by host."""

    def __init__(
        self,
        inventory: InventorySource,
        views: Callable[[], Iterable[InstanceView]],
        muxes: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._inventory = inventory
        self._views = views
        self._muxes = muxes

    async def page(self) -> Page:
        page: Page = {}
        for gpu in (await self._inventory.read()).gpus:
            index = f"{gpu.node}/{gpu.index}" if gpu.node else str(gpu.index)  # indexes start at 0 on each host
            if (total := gpu.memory_total_bytes) is not None:
                add(page, catalogue.GPU_MEMORY_TOTAL, total, gpu=index, uuid=gpu.uuid, name=gpu.name)
            for family, gauge in _GAUGES.items():
                if (value := gauge(gpu)) is not None:
                    add(page, family, value, gpu=index)
            for view in self._views():
                if (held := _memory(view, gpu)) is not None:
                    add(page, catalogue.GPU_INSTANCE_MEMORY, held, gpu=index, instance=view.spec.name)
        return page

    async def to_dict(self) -> dict[str, Any]:
        inventory = await self._inventory.read()
        gpus = []
        for gpu in inventory.gpus:
            workers = [
                {"name": view.spec.name, "pid": pid, "memory_bytes": gpu.memory_of.get(pid)}
                for view in self._views()
                for pid in _pids(view, gpu)
            ]
            gpus.append(_card(gpu) | {"instances": workers})
        return {"gpus": gpus, "reason": inventory.reason}

    async def hosts(self) -> dict[str, Any]:
        """`Hosts` as plain values."""
        inventory = await self._inventory.read()
        alive = Counter(worker.node for view in self._views() for worker in view.workers if worker.pid is not None)
        on_hosts, muxes = Counter(gpu.node for gpu in inventory.gpus), self._muxes()
        return {
            "hosts": [
                asdict(host)
                | {"gpus": on_hosts[host.name], "workers": alive[host.name]}
                | {"mux": muxes.get(host.name), "problem": host.problem or None}
                for host in inventory.hosts
            ]
        }

    async def of(self, view: InstanceView) -> dict[str, Any] | None:
        """`CardOfInstance` as plain values: the first GPU that the instance is on; None while it is on none."""
        return (await self.cards())(view)

    async def cards(self) -> Callable[[InstanceView], dict[str, Any] | None]:
        """Return the function that does what `of` does, by the present figures of the GPUs."""
        gpus = (await self._inventory.read()).gpus

        def card_of(view: InstanceView) -> dict[str, Any] | None:
            gpu = next((each for each in gpus if _pids(view, each)), None)
            return None if gpu is None else _card(gpu) | {"instance_memory_bytes": _memory(view, gpu)}

        return card_of


def _pids(view: InstanceView, gpu: Gpu) -> list[int]:
    """The workers of an instance that were placed on a GPU; the driver cannot list processes everywhere."""
    return [worker.pid for worker in view.workers if worker.pid is not None and worker.gpu == gpu.uuid]


def _memory(view: InstanceView, gpu: Gpu) -> int | None:
    """GPU memory of all workers of an instance, in bytes; None if the driver does not report it."""
    known = [gpu.memory_of[pid] for pid in _pids(view, gpu) if pid in gpu.memory_of]
    return sum(known) if known else None


def _card(gpu: Gpu) -> dict[str, Any]:
    return {name: getattr(gpu, name) for name in Card.model_fields} | {"node": gpu.node or None}


def gpu_report_of(request: Request) -> GpuReport | None:
    report: GpuReport | None = request.app.state.gpus
    return report


GpuReportDep = Annotated[GpuReport | None, Depends(gpu_report_of)]


@gpu_router.get("/gpus", response_model=Gpus)
async def list_gpus(gpus: GpuReportDep) -> Response:
    """The GPUs that instances may use, of all hosts, with memory, load and workers."""
    assert gpus is not None
    return answer(await gpus.to_dict())


@gpu_router.get("/hosts", response_model=Hosts)
async def list_hosts(gpus: GpuReportDep) -> Response:
    """The hosts of the cluster, with cores, memory, workers and versions; none in a fleet of one host."""
    assert gpus is not None
    return answer(await gpus.hosts())
