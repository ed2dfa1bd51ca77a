"""What the next worker of an instance is to be told: where it runs, its threads, its flags."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from teimgr.config.extra_args import parse
from teimgr.config.settings import Settings
from teimgr.errors import InvalidGpuId, TeimgrError
from teimgr.placement.gpus import Gpu, GpuInventory, Inventory
from teimgr.spec import WORKER_KEYS, InstanceSpec, WorkerSpec


def worker_spec(
    spec: InstanceSpec, settings: Settings, gpu_uuid: str | None, threads: int, replica: int = 0
) -> WorkerSpec:
    """The orders of one worker. `extra_args` win over the instance's fields, which win over the settings.

    Raises:
        InvalidConfig: an extra argument cannot be understood.
    """
    told = WorkerSpec(
        **{name: getattr(spec, name) for name in WORKER_KEYS},
        replica=replica,
        gpu=gpu_uuid,
        threads=threads,
        instance_host=settings.instance_host,
        max_client_batch_size=settings.max_client_batch_size,
        max_message_bytes=settings.grpc_max_message_bytes,
        arrow_output_dtype=settings.arrow_output_dtype,
        orphan_grace_s=float(settings.orphan_grace_secs),
        nice=settings.cpu_worker_nice if gpu_uuid is None else 0,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )
    return replace(told, **parse(spec.extra_args))


CPU_TOKENS = 16384
"""On the CPU, and on a card that does not say what is free. There, larger batches gain nothing."""
_GIB = 2**30


def with_batch_tokens(spec: InstanceSpec, inventory: Inventory, per_gib: int) -> InstanceSpec:
    """`spec` with a number of its own: `per_gib` tokens for each GiB that is free now where it would be placed.

    With several replicas the fullest of the cards decides, and one GiB's worth is the least.

    Raises:
        InvalidGpuId: `gpu_id` is none of the cards.
    """
    if spec.max_batch_tokens:
        return spec
    free_bytes = min((card.memory_free_bytes for card in _cards(spec, inventory)), default=0)
    tokens = max(per_gib, free_bytes * per_gib // _GIB) if free_bytes else CPU_TOKENS
    return replace(spec, max_batch_tokens=tokens)


def _cards(spec: InstanceSpec, inventory: Inventory) -> list[Gpu]:
    if spec.gpu_id is None and spec.replicas != 1:
        return list(inventory.gpus)
    card = place(spec, inventory)
    return [card] if card else []


@dataclass(frozen=True, slots=True)
class Others:
    """The workers that a new one has to get on with.

    `alive` share the cores, the new one among them. `loading` counts by card those whose memory it cannot show yet,
    `beside` the other replicas of the same crew.
    """

    alive: Sequence[InstanceSpec]
    loading: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[str, int] = field(default_factory=dict)


class Planner:
    """`inventory` is the last one that was looked at. Only `look` waits, so plans cannot be outrun by one another."""

    def __init__(self, settings: Settings, gpus: GpuInventory, cores: int) -> None:
        self.inventory = Inventory()
        self._settings = settings
        self._gpus = gpus
        self._cores = cores

    async def look(self) -> Inventory:
        """The cards as they are now."""
        self.inventory = await self._gpus.read()
        return self.inventory

    def plan(self, spec: InstanceSpec, replica: int, others: Others) -> WorkerSpec:
        """The orders for one launch.

        Raises:
            TeimgrError: there is no place for it, or it cannot be told.
        """
        gpu = place(spec, self.inventory, others.loading, others.beside)
        threads = self.shares(others.alive).get(spec.name, 1)
        return worker_spec(spec, self._settings, gpu.uuid if gpu else None, threads, replica)

    def accepts(self, spec: InstanceSpec, found: WorkerSpec) -> bool:
        """Whether a live worker that was told `found` is one that we could have launched for `spec` now."""
        if found.replica >= self.replicas(spec):
            return False
        try:
            chosen = place(spec, self.inventory) if spec.gpu_id is not None else None
            gpu = chosen.uuid if chosen else found.gpu
            same = worker_spec(spec, self._settings, gpu, 1, found.replica).hash == found.hash
        except TeimgrError:
            return False
        return same and (found.gpu is None or found.gpu in {gpu.uuid for gpu in self.inventory.gpus})

    def replicas(self, spec: InstanceSpec) -> int:
        """How many workers `spec` asks for on this host."""
        return replica_count(spec, self.inventory)

    def shares(self, alive: Sequence[InstanceSpec]) -> dict[str, int]:
        """CPU threads of each worker, by its instance's name."""
        return share_threads(self._cores, alive)

    def index_of(self, gpu: str | None) -> int | None:
        """The index of the card with this UUID."""
        return next((card.index for card in self.inventory.gpus if card.uuid == gpu), None)


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


def replica_count(spec: InstanceSpec, inventory: Inventory) -> int:
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
