"""The GPUs of this host, as NVML tells them: no CUDA context, no torch.

NVML orders by PCI bus and CUDA may not, so a card is known by its UUID; its index is what users say as `gpu_id`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml

READING_AGE_S = 1.0
_FAILURE_AGE_S = 10.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. Free memory is in bytes, 0 where the card does not say; the other figures are None there.

    `memory_of` is what the driver gave each process, by process id; empty where it does not tell, as inside containers.
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


@dataclass(frozen=True, slots=True)
class Inventory:
    """The cards a worker may use; `reason` says why there are none."""

    gpus: tuple[Gpu, ...] = ()
    reason: str = ""

    @property
    def indexes(self) -> list[int]:
        """What `gpu_id` may be."""
        return [gpu.index for gpu in self.gpus]


class GpuInventory:
    """Reads the inventory, at most once per second; a missing driver is asked for again later, for it may appear."""

    def __init__(self, environ: Mapping[str, str] = os.environ, read: Callable[[], Inventory] | None = None) -> None:
        self._visible = environ.get("CUDA_VISIBLE_DEVICES")
        self._read_now = read or read_nvml
        self._known = Inventory(reason="not read yet")
        self._read_at = float("-inf")

    async def read(self) -> Inventory:
        """The cards and their free memory, now. Slow drivers do not hold up the event loop."""
        age_s = READING_AGE_S if self._known.gpus else _FAILURE_AGE_S
        if time.monotonic() - self._read_at >= age_s:
            everything = await asyncio.to_thread(self._read_now)
            self._known = only_visible(everything, self._visible)
            self._read_at = time.monotonic()
        return self._known


def read_nvml() -> Inventory:
    """All cards of the host, whatever CUDA_VISIBLE_DEVICES says."""
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
    """The cards that the daemon's own CUDA_VISIBLE_DEVICES names, by index or by the start of their UUID."""
    if visible is None or not inventory.gpus:
        return inventory
    names = [name.strip() for name in visible.split(",") if name.strip()]
    shown = [gpu for gpu in inventory.gpus if any(_is_named(gpu, name) for name in names)]
    return _inventory(shown, f"CUDA_VISIBLE_DEVICES={visible!r} shows none of the {len(inventory.gpus)} cards")


def _inventory(gpus: Iterable[Gpu], reason_for_none: str = "the driver knows no card") -> Inventory:
    found = tuple(gpus)
    return Inventory(found, "" if found else reason_for_none)


def _is_named(gpu: Gpu, name: str) -> bool:
    return gpu.index == int(name) if name.isdecimal() else gpu.uuid.startswith(name)


def _card(index: int) -> Gpu:
    device = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = _told(lambda: pynvml.nvmlDeviceGetMemoryInfo(device))
    load = _told(lambda: pynvml.nvmlDeviceGetUtilizationRates(device))
    power_mw = _told(lambda: pynvml.nvmlDeviceGetPowerUsage(device))
    capability = _told(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(device))
    processes = _told(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(device))
    return Gpu(
        index,
        _text(pynvml.nvmlDeviceGetUUID(device)),
        int(memory.free) if memory else 0,
        name=_text(_told(lambda: pynvml.nvmlDeviceGetName(device)) or ""),
        memory_total_bytes=int(memory.total) if memory else None,
        memory_used_bytes=int(memory.used) if memory else None,
        utilization=load.gpu / 100 if load else None,
        temperature_c=_told(lambda: pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU)),
        power_w=None if power_mw is None else power_mw / 1000,
        compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
        memory_of={each.pid: int(each.usedGpuMemory) for each in processes or () if each.usedGpuMemory is not None},
    )


def _told(ask: Callable[[], Any]) -> Any:
    """What the driver answers; None where it does not support the question, as under MIG or with unified memory."""
    try:
        return ask()
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
