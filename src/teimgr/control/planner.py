"""What the next worker of an instance is to be told: where it runs, its threads, its flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from teimgr.control import placement
from teimgr.control.gpus import GpuInventory, Inventory
from teimgr.control.placement import place, share_threads
from teimgr.control.workerspec import worker_spec
from teimgr.errors import TeimgrError
from teimgr.settings import Settings
from teimgr.spec import InstanceSpec, WorkerSpec


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
