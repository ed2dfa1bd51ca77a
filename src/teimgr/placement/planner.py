"""What the next worker of an instance is to be told: where it runs, its threads, its flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from teimgr.config.extra_args import parse
from teimgr.config.settings import Settings
from teimgr.errors import TeimgrError
from teimgr.placement import placement
from teimgr.placement.gpus import Gpu, GpuInventory, Inventory
from teimgr.placement.placement import place, share_threads
from teimgr.spec import InstanceSpec, WorkerSpec


def worker_spec(
    spec: InstanceSpec, settings: Settings, gpu_uuid: str | None, threads: int, replica: int = 0
) -> WorkerSpec:
    """The orders of one worker. `extra_args` win over the instance's fields, which win over the settings.

    Raises:
        InvalidConfig: an extra argument cannot be understood.
    """
    told = WorkerSpec(
        name=spec.name,
        model_id=spec.model_id,
        replica=replica,
        revision=spec.revision,
        dtype=spec.dtype,
        pooling=spec.pooling,
        kind=spec.kind,
        trust_remote_code=spec.trust_remote_code,
        gpu=gpu_uuid,
        threads=threads,
        instance_host=settings.instance_host,
        port=spec.port,
        prometheus_port=spec.prometheus_port,
        max_batch_tokens=spec.max_batch_tokens,
        max_concurrent_requests=spec.max_concurrent_requests,
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
        return placement.replicas(spec, self.inventory)

    def shares(self, alive: Sequence[InstanceSpec]) -> dict[str, int]:
        """CPU threads of each worker, by its instance's name."""
        return share_threads(self._cores, alive)

    def index_of(self, gpu: str | None) -> int | None:
        """The index of the card with this UUID."""
        return next((card.index for card in self.inventory.gpus if card.uuid == gpu), None)
