"""What the next worker of an instance is to be told: where it runs, its threads, its flags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from teimgr.control.gpus import GpuInventory, Inventory
from teimgr.control.placement import place, share_threads
from teimgr.control.workerspec import worker_spec
from teimgr.errors import TeimgrError
from teimgr.settings import Settings
from teimgr.spec import InstanceSpec, WorkerSpec


class Planner:
    """Remembers where it placed each instance; `inventory` is the last one it looked at."""

    def __init__(self, settings: Settings, gpus: GpuInventory, cores: int) -> None:
        self.inventory = Inventory()
        self._settings = settings
        self._gpus = gpus
        self._cores = cores
        self._placed: dict[str, str | None] = {}

    async def plan(self, spec: InstanceSpec, alive: Sequence[InstanceSpec], starting: Sequence[str]) -> WorkerSpec:
        """The orders for one launch. `alive` share the cores; `starting` names whose memory no card may show yet.

        Raises:
            TeimgrError: there is no place for it, or it cannot be told.
        """
        self.inventory = await self._gpus.read()
        loading = Counter(uuid for name in starting if name != spec.name and (uuid := self._placed.get(name)))
        gpu = place(spec, self.inventory, loading)
        self._placed[spec.name] = uuid = gpu.uuid if gpu else None
        return worker_spec(spec, self._settings, uuid, self.shares(alive).get(spec.name, 1))

    def accepts(self, spec: InstanceSpec, found: WorkerSpec) -> bool:
        """Whether a live worker that was told `found` is one that we could have launched for `spec` now."""
        try:
            chosen = place(spec, self.inventory) if spec.gpu_id is not None else None
            same = worker_spec(spec, self._settings, chosen.uuid if chosen else found.gpu, 1).hash == found.hash
        except TeimgrError:
            return False
        fits = same and (found.gpu is None or found.gpu in {gpu.uuid for gpu in self.inventory.gpus})
        if fits:
            self._placed[spec.name] = found.gpu
        return fits

    def shares(self, alive: Sequence[InstanceSpec]) -> dict[str, int]:
        """CPU threads by name."""
        return share_threads(self._cores, alive)

    def forget(self, name: str) -> None:
        """The instance is deleted."""
        self._placed.pop(name, None)
