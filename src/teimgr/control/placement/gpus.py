"""Cards and hosts that workers may use: `Inventory`, and its reading from NVML (`GpuInventory`)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pynvml

from teimgr.control.placement.hosts import Host

READING_AGE_S = 1.0
_FAILURE_AGE_S = 10.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. Values that the driver does not report are None, free memory 0.

    `node` is the name of its host in a cluster, empty in a fleet of one host; `index` is that of its host. `memory_of`
    is the memory of each process in bytes, by pid; empty where it is not reported, as inside containers.
    """

    index: int
    uuid: str
    memory_free_bytes: int
    name: str = ""
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization: float | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    compute_capability: tuple[int, int] | None = None
    memory_of: Mapping[int, int] = field(default_factory=dict)
    node: str = ""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The cards that workers may use; `reason` explains an empty list. `hosts` are those of a cluster.

    `misses_cards`: the host has cards, and CUDA_VISIBLE_DEVICES names others.
    """

    gpus: tuple[Gpu, ...] = ()
    reason: str = ""
    hosts: tuple[Host, ...] = ()
    misses_cards: bool = False


class InventorySource(Protocol):
    """Reads the present inventory: of this host, or of all hosts of a cluster."""

    async def read(self) -> Inventory:
        """The cards with their free memory, and the hosts of a cluster; soon, as launches wait for it."""


class GpuInventory:
    """Reads the inventory of this host, at most once per second, or every 10 seconds without a driver."""

    def __init__(self, environ: Mapping[str, str] = os.environ, read: Callable[[], Inventory] | None = None) -> None:
        self._visible = environ.get("CUDA_VISIBLE_DEVICES")
        self._read_now = read or read_nvml
        self._known = Inventory(reason="not read yet")
        self._read_at = float("-inf")

    async def read(self) -> Inventory:
        """The cards and their free memory; a slow driver does not block the event loop."""
        age_s = READING_AGE_S if self._known.gpus else _FAILURE_AGE_S
        if time.monotonic() - self._read_at >= age_s:
            everything = await asyncio.to_thread(self._read_now)
            self._known = only_visible(everything, self._visible)
            self._read_at = time.monotonic()
        return self._known


def read_nvml() -> Inventory:
    """All cards of the host, regardless of CUDA_VISIBLE_DEVICES."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Inventory(reason=f"no NVIDIA driver: {error}")
    try:
        return _inventory(_card(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        return Inventory(reason=f"NVML failed: {error}")
    finally:
        pynvml.nvmlShutdown()


def only_visible(inventory: Inventory, visible: str | None) -> Inventory:
    """The cards in `visible`, the daemon's CUDA_VISIBLE_DEVICES, by index or by the start of their UUID.

    Partitions of a card (MIG) are not among them.
    """
    if visible is None or not inventory.gpus:
        return inventory
    names = [name.strip() for name in visible.split(",") if name.strip()]
    shown = [gpu for gpu in inventory.gpus if any(_is_named(gpu, name) for name in names)]
    reason = f"CUDA_VISIBLE_DEVICES={visible!r} shows none of the {len(inventory.gpus)} cards"
    if any(name.startswith("MIG-") for name in names):
        reason += "; partitions of a card (MIG) are not supported"
    wants_cards = any(name.isdecimal() or name.startswith(("GPU-", "MIG-")) for name in names)
    return replace(_inventory(shown, reason), misses_cards=wants_cards and not shown)


def _inventory(gpus: Iterable[Gpu], reason_for_none: str = "the driver lists no card") -> Inventory:
    found = tuple(gpus)
    return Inventory(found, "" if found else reason_for_none)


def _is_named(gpu: Gpu, name: str) -> bool:
    return gpu.index == int(name) if name.isdecimal() else gpu.uuid.startswith(name)


def _card(index: int) -> Gpu:
    device = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = _supported(lambda: pynvml.nvmlDeviceGetMemoryInfo(device))
    load = _supported(lambda: pynvml.nvmlDeviceGetUtilizationRates(device))
    power_mw = _supported(lambda: pynvml.nvmlDeviceGetPowerUsage(device))
    capability = _supported(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(device))
    processes = _supported(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(device))
    return Gpu(
        index,
        _text(pynvml.nvmlDeviceGetUUID(device)),
        int(memory.free) if memory else 0,
        name=_text(_supported(lambda: pynvml.nvmlDeviceGetName(device)) or ""),
        memory_total_bytes=int(memory.total) if memory else None,
        memory_used_bytes=int(memory.used) if memory else None,
        utilization=load.gpu / 100 if load else None,
        temperature_c=_supported(lambda: pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU)),
        power_w=None if power_mw is None else power_mw / 1000,
        compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
        memory_of={each.pid: int(each.usedGpuMemory) for each in processes or () if each.usedGpuMemory is not None},
    )


def _supported(query: Callable[[], Any]) -> Any:
    """The result of an NVML query; None if it is not supported, as under MIG or with unified memory."""
    try:
        return query()
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
