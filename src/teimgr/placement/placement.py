"""Where an instance runs: which GPU, or the CPU, and with how many threads. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from teimgr.errors import InvalidGpuId
from teimgr.placement.gpus import Gpu, Inventory
from teimgr.spec import InstanceSpec

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpu_max: Path = _CPU_MAX) -> int:
    """The cores of our affinity mask, or fewer where a container's quota allows less; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, _quota_cores(cpu_max) or allowed))


def _quota_cores(cpu_max: Path) -> int | None:
    """The quota in whole cores, rounded to the nearest; None where there is no limit."""
    try:
        quota, period = cpu_max.read_text().split()
        return None if quota == "max" else max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        return None


LOADING_BYTES = 2 << 30
"""What a worker that is still loading is taken to need, for the card's own figure does not show it yet."""


def place(
    spec: InstanceSpec,
    inventory: Inventory,
    loading: Mapping[str, int] | None = None,
    beside: Mapping[str, int] | None = None,
) -> Gpu | None:
    """The card for one more worker of `spec`; None means the CPU, which is for hosts without a card.

    `loading` counts, by UUID, the workers whose memory NVML cannot show yet, `beside` the other replicas of the
    instance. Without a `gpu_id` a card with the fewest of these wins, among equals that with the most memory to spare.

    Raises:
        InvalidGpuId: `gpu_id` is none of the cards.
    """
    if spec.gpu_id is not None:
        return _named(spec.gpu_id, inventory)
    pending, others = loading or {}, beside or {}
    return max(inventory.gpus, key=lambda gpu: (-others.get(gpu.uuid, 0), _spare_bytes(gpu, pending)), default=None)


def replicas(spec: InstanceSpec, inventory: Inventory) -> int:
    """How many workers `spec` asks for; one for each card, where it does not name a number, and at least one."""
    return max(1, len(inventory.gpus)) if spec.replicas == "per-gpu" else spec.replicas


def _named(gpu_id: int, inventory: Inventory) -> Gpu:
    for gpu in inventory.gpus:
        if gpu.index == gpu_id:
            return gpu
    raise InvalidGpuId(gpu_id, inventory.indexes, inventory.reason)


def _spare_bytes(gpu: Gpu, loading: Mapping[str, int]) -> int:
    return gpu.memory_free_bytes - LOADING_BYTES * loading.get(gpu.uuid, 0)


def share_threads(cores: int, workers: Iterable[InstanceSpec]) -> dict[str, int]:
    """Name → CPU threads of each of its workers: an equal share of the cores, at least one; explicit `threads` win.

    `workers` has the spec of each worker, so an instance's once for each of its replicas.
    """
    specs = list(workers)
    share = max(1, cores // max(1, len(specs)))
    return {spec.name: spec.threads or share for spec in specs}
