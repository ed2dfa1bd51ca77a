"""GET /gpus, and the GPUs on the page of metrics: what the driver says of each card and of the instances on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from teimgr.observability import catalogue
from teimgr.observability.catalogue import Family
from teimgr.observability.exposition import Page, Sample
from teimgr.placement.gpus import Gpu, GpuInventory
from teimgr.rest.json_http import answer
from teimgr.rest.schemas import Card
from teimgr.spec import InstanceView

router = APIRouter(tags=["gpus"])

_FIGURES: dict[Family, Callable[[Gpu], float | None]] = {
    catalogue.GPU_MEMORY_USED: lambda gpu: gpu.memory_used_bytes,
    catalogue.GPU_UTILIZATION: lambda gpu: gpu.utilization,
    catalogue.GPU_TEMPERATURE: lambda gpu: gpu.temperature_c,
    catalogue.GPU_POWER: lambda gpu: gpu.power_w,
}


class OnGpu(BaseModel):
    """A worker of an instance, a process on a card."""

    name: str
    pid: int
    memory_bytes: int | None = Field(
        description="what the driver gave the process; null where the driver does not tell"
    )


class GpuInfo(Card):
    """A GPU and who is on it."""

    instances: list[OnGpu]


class Gpus(BaseModel):
    """The cards that instances may use; `reason` says why there are none."""

    gpus: list[GpuInfo]
    reason: str


class GpuBoard:
    """Cards and who is on them. `views` gives the instances as they are now."""

    def __init__(self, inventory: GpuInventory, views: Callable[[], Iterable[InstanceView]]) -> None:
        self._inventory = inventory
        self._views = views

    async def page(self) -> Page:
        """The part of the page of metrics."""
        page: Page = {}
        for gpu in (await self._inventory.read()).gpus:
            index = {"gpu": str(gpu.index)}
            if gpu.memory_total_bytes is not None:
                labels = index | {"uuid": gpu.uuid, "name": gpu.name}
                page.setdefault(catalogue.GPU_MEMORY_TOTAL, []).append(Sample("", labels, gpu.memory_total_bytes))
            for family, figure in _FIGURES.items():
                if (value := figure(gpu)) is not None:
                    page.setdefault(family, []).append(Sample("", index, value))
            for view in self._views():
                if (held := _memory(view, gpu)) is not None:
                    labels = index | {"instance": view.spec.name}
                    page.setdefault(catalogue.GPU_INSTANCE_MEMORY, []).append(Sample("", labels, held))
        return page

    async def to_dict(self) -> dict[str, Any]:
        """`Gpus` as plain values."""
        inventory = await self._inventory.read()
        return {"gpus": [self._info(gpu) for gpu in inventory.gpus], "reason": inventory.reason}

    async def of(self, view: InstanceView) -> dict[str, Any] | None:
        """The card of an instance, of several the first, as its JSON shows it; None while it has none."""
        for gpu in (await self._inventory.read()).gpus:
            if _pids(view, gpu):
                return _figures(gpu) | {"instance_memory_bytes": _memory(view, gpu)}
        return None

    def _info(self, gpu: Gpu) -> dict[str, Any]:
        on = [
            {"name": view.spec.name, "pid": pid, "memory_bytes": gpu.memory_of.get(pid)}
            for view in self._views()
            for pid in _pids(view, gpu)
        ]
        return _figures(gpu) | {"instances": on}


def _pids(view: InstanceView, gpu: Gpu) -> list[int]:
    """The workers of an instance that were placed on a card; the driver does not tell of processes everywhere."""
    return [worker.pid for worker in view.workers if worker.pid is not None and worker.gpu == gpu.uuid]


def _memory(view: InstanceView, gpu: Gpu) -> int | None:
    """What the driver gave all of them; None where it does not tell."""
    told = [gpu.memory_of[pid] for pid in _pids(view, gpu) if pid in gpu.memory_of]
    return sum(told) if told else None


def _figures(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "memory_total_bytes": gpu.memory_total_bytes,
        "memory_used_bytes": gpu.memory_used_bytes,
        "memory_free_bytes": gpu.memory_free_bytes,
        "utilization": gpu.utilization,
        "temperature_c": gpu.temperature_c,
        "power_w": gpu.power_w,
    }


def board_of(request: Request) -> GpuBoard | None:
    """The board that the application was given, if any."""
    board: GpuBoard | None = request.app.state.gpus
    return board


TheBoard = Annotated[GpuBoard | None, Depends(board_of)]


async def card_of(view: InstanceView, board: GpuBoard | None) -> dict[str, Any] | None:
    """The card of an instance; None where nobody knows of cards."""
    return None if board is None else await board.of(view)


@router.get("/gpus", response_model=Gpus)
async def list_gpus(board: TheBoard) -> Response:
    """The cards of this host that instances may use, with memory, load and who is on them."""
    assert board is not None  # or this route were not there
    return answer(await board.to_dict())
