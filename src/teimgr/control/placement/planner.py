"""Placement of workers, the bounds of loads at a time, and the making of `WorkerSpec`: threads, batch tokens.

`decide` and what it calls are pure functions, which decide alike for a launch, a plan (`dry_run`) and a move.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable, KeysView, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from teimgr.config.instance_keys import model_roots, parse
from teimgr.config.settings import Settings
from teimgr.control.ledger.admission import Admission
from teimgr.control.ledger.footprints import CONTEXT_BYTES, Footprints, figures_path
from teimgr.control.ledger.ledger import Footprint, Ledger, Place
from teimgr.control.ledger.system_memory import free_memory_bytes, host_memory, memory_label
from teimgr.control.placement.hosts import Gpu, Host, Inventory, InventorySource, allows, best_host, candidates
from teimgr.errors import InvalidGpuId, NoHost, TeimgrError, ValidationError
from teimgr.spec import KEYS, WORKER_KEYS, Change, CpuThreads, InstanceSpec, WorkerSpec

FootprintOf = Callable[[InstanceSpec, str], Footprint]
"""Returns the footprint of a model on a kind of device."""


@dataclass(frozen=True, slots=True)
class Others:
    """The existing workers, as the placement of a new one sees them.

    `alive` counts the workers of each host, including the new one if it has a host already; a fleet of one host has
    the name "". `free` are the bytes left on each card by GPU UUID, `needed` those that the worker needs on a card.
    `beside` and `beside_hosts` count the other replicas of the instance by GPU UUID and by host.
    """

    alive: Mapping[str, int] = field(default_factory=dict)
    free: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[str, int] = field(default_factory=dict)
    beside_hosts: Mapping[str, int] = field(default_factory=dict)
    needed: int = 2 << 30


def others_in(
    spec: InstanceSpec,
    inventory: Inventory,
    memory: Ledger,
    alive: Mapping[str, int],
    footprint: FootprintOf,
    beside: Sequence[Place] = (),
    claimed: Callable[[str], int] = lambda device: 0,
) -> Others:
    """The workers that a new one of `spec` finds; `beside` has the places of the other replicas of the instance.

    A card of unknown size has less the more is reserved on it. `claimed` gives the bytes for which loads wait.
    """
    left = {gpu.uuid: memory.free(gpu.uuid) for gpu in inventory.gpus}
    free = {uuid: (-memory.reserved(uuid) if found is None else found) - claimed(uuid) for uuid, found in left.items()}
    on_cards = Counter(where.gpu for where in beside if where.gpu is not None)
    on_hosts = Counter(where.host for where in beside if where.host)
    return Others(alive, free, on_cards, on_hosts, footprint(spec, card_kind(inventory)).device_bytes)


class Placement(NamedTuple):
    """A worker's place, and the kind of its device, which determines the footprint."""

    place: Place
    device_kind: str


def decide(spec: InstanceSpec, inventory: Inventory, others: Others) -> Placement:
    """The place of one more worker of `spec`.

    Raises:
        InvalidGpuId, NoHost, ValidationError: as `place`.
    """
    card = place(spec, inventory, others)
    host = card.node if card else cpu_host(spec, inventory, others)
    return Placement(Place(host, card.uuid if card else None), device_kind(card))


def place(spec: InstanceSpec, inventory: Inventory, others: Others | None = None) -> Gpu | None:
    """The card for one more worker of `spec`; None means the CPU, where no host that fits has a card.

    Without a `gpu_id`, the cards on the hosts with the fewest other replicas are preferred, then those with the fewest
    themselves, among them the one with the most spare memory. To "pack" is to prefer the hosts with the most replicas,
    and the fullest card that has room for a loading worker.

    Raises:
        InvalidGpuId: `gpu_id` is not one of the cards.
        NoHost: none of the hosts fits.
        ValidationError: it names a host or labels in a fleet of one host.
    """
    others, cards = others or Others(), inventory.gpus
    if not inventory.hosts and (spec.node is not None or spec.labels):
        raise ValidationError("node and labels need a cluster, which is not configured ([cluster] address)")
    if inventory.hosts:
        fitting = {host.name for host in candidates(spec, inventory.hosts)}
        cards = tuple(card for card in cards if card.node in fitting)
    if spec.gpu_id is not None:
        named = tuple(gpu for gpu in cards if gpu.index == spec.gpu_id)
        if not named:
            raise InvalidGpuId(spec.gpu_id, sorted({gpu.index for gpu in cards}), inventory.reason)
        cards = named

    def spare_bytes(gpu: Gpu) -> int:
        return others.free.get(gpu.uuid, gpu.memory_free_bytes)

    def spread(gpu: Gpu) -> tuple[int, ...]:
        return -others.beside_hosts.get(gpu.node, 0), -others.beside.get(gpu.uuid, 0), spare_bytes(gpu)

    def pack(gpu: Gpu) -> tuple[int, ...]:
        has_room = spare_bytes(gpu) >= others.needed
        crowd = others.beside_hosts.get(gpu.node, 0), others.alive.get(gpu.node, 0)
        return (has_room, *crowd, -others.beside.get(gpu.uuid, 0), -spare_bytes(gpu))

    return max(cards, key=pack if spec.placement == "pack" else spread, default=None)


def cpu_host(spec: InstanceSpec, inventory: Inventory, others: Others) -> str:
    """The host for one more worker of `spec` on the CPU; "" in a fleet of one host.

    Raises:
        NoHost: none of the hosts fits.
    """
    if not inventory.hosts:
        return ""
    return best_host(spec, candidates(spec, inventory.hosts), others.alive, others.beside_hosts).name


def only_at(inventory: Inventory, where: Place) -> Inventory:
    """The part of the inventory that one place is. Raises NoHost: it is not there."""
    cards = tuple(card for card in inventory.gpus if card.uuid == where.gpu)
    hosts = tuple(host for host in inventory.hosts if host.name == where.host)
    if (where.gpu is not None and not cards) or (where.host and not hosts):
        raise NoHost(f"{where.gpu or where.host} is no longer available")
    return replace(inventory, gpus=cards, hosts=hosts)


def replica_count(spec: InstanceSpec, inventory: Inventory) -> int:
    """The number of workers; "per-gpu" is one for each card of the hosts that fit, and at least one."""
    if spec.replicas != "per-gpu":
        return spec.replicas
    hosts = {host.name for host in inventory.hosts if allows(spec, host.name, inventory.hosts)}
    return max(1, sum(not inventory.hosts or gpu.node in hosts for gpu in inventory.gpus))


def device_kind(card: Gpu | None) -> str:
    """The kind of device that a measured footprint is of: "cpu", or the name of the card."""
    return "cpu" if card is None else card.name or "gpu"


def card_kind(inventory: Inventory) -> str:
    """The kind of the first card, "cpu" without one."""
    return device_kind(next(iter(inventory.gpus), None))


_LOADS_PER_CARD = 4  # more would compete for the disk and the bus
GPU_TOKENS_MAX = 32768
"""Limit of batch tokens chosen by card memory: larger batches are not faster, and queries wait for a batch."""
CPU_TOKENS = 16384
"""Batch tokens on the CPU, where larger batches are not faster, and on cards with unknown free memory."""
_GIB = 2**30
_WITH_DEFAULTS = ("token_inputs", "token_encoding")  # their default is a setting of the daemon
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


class FleetCounts:
    """Live workers by host; `set` is called when an instance changes."""

    def __init__(self) -> None:
        self.alive: Counter[str] = Counter()
        self._instances: dict[str, Counter[str]] = {}

    @property
    def instances(self) -> KeysView[str]:
        """The names of those with live workers."""
        return self._instances.keys()

    def set(self, name: str, alive: Counter[str]) -> None:
        """Count the workers of an instance again."""
        before = self._instances.pop(name, Counter[str]())
        self.alive.update(alive)
        self.alive.subtract(before)
        if alive:
            self._instances[name] = alive


class LoadSlots:
    """Limits concurrent loads on a device, first come first served; one is always allowed.

    Otherwise all workers would load at once after a reboot and exceed memory and startup timeouts. `limit` returns
    the number for the UUID of a card, or for None, the CPU.
    """

    def __init__(self, limit: Callable[[str | None], int]) -> None:
        self._limit = limit
        self._loading: Counter[str | None] = Counter()
        self._waiting: defaultdict[str | None, deque[asyncio.Future[None]]] = defaultdict(deque)

    async def take(self, gpu: str | None) -> None:
        """Return when a worker may load; `give_back` must follow."""
        waiting = self._waiting[gpu]
        if not waiting and self._fits(gpu):
            self._loading[gpu] += 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self.give_back(gpu)
            elif granted in waiting:
                waiting.remove(granted)
            raise

    def give_back(self, gpu: str | None) -> None:
        """Return a slot, which the next may have."""
        self._loading[gpu] -= 1
        waiting = self._waiting[gpu]
        while waiting and self._fits(gpu):
            granted = waiting.popleft()
            if not granted.done():  # cancelled waiters need no slot
                self._loading[gpu] += 1
                granted.set_result(None)

    def _fits(self, gpu: str | None) -> bool:
        return self._loading[gpu] < max(1, self._limit(gpu))


class Planner:
    """Places workers by the last reading of `inventory`. `counts`, `slots` and `memory` belong to the fleet.

    Only `refresh` awaits, so two plans cannot interleave.
    """

    def __init__(self, settings: Settings, gpus: InventorySource, cores: int) -> None:
        self.inventory = Inventory()
        self.counts = FleetCounts()
        self.slots = LoadSlots(self.load_limit)
        self.memory = Admission(
            Ledger(
                _bytes(settings.host_memory_budget_mib),
                _bytes(settings.gpu_memory_budget_mib),
                refuses=settings.memory_check,
            ),
            Footprints(figures_path(settings.state_file)),
            self.refresh,
        )
        self._settings = settings
        self._gpus = gpus
        self._cores = cores
        self._hosts: tuple[tuple[Host, ...], dict[str, Host]] = ((), {})

    async def refresh(self) -> Inventory:
        self.inventory = await self._gpus.read()
        self._report_memory()
        return self.inventory

    def _report_memory(self) -> None:
        """Tell the ledger what hosts and cards have, as last read."""
        for host in self.inventory.hosts:
            self.memory.ledger.report(host.name, f"host {host.name}", host.memory_total_bytes, host.memory_free_bytes)
        if not self.inventory.hosts:
            self.memory.ledger.report("", memory_label(), host_memory()[0] or None, free_memory_bytes())
        for card in self.inventory.gpus:
            label = f"GPU {card.index} of {card.node}" if card.node else f"GPU {card.index}"
            free = None if card.memory_total_bytes is None else card.memory_free_bytes
            self.memory.ledger.report(card.uuid, label, card.memory_total_bytes, free, is_card=True)

    def bytes_on_card(self, gpu: str | None, pid: int, allocated: int) -> int:
        """Return a worker's bytes of its card: by the driver, or its allocator's and those of a context."""
        if gpu is None:
            return 0
        card = next((card for card in self.inventory.gpus if card.uuid == gpu), None)
        return (card.memory_of.get(pid) if card else None) or allocated + CONTEXT_BYTES

    def device_kind(self, gpu: str | None) -> str:
        """Like the function, for the card with this UUID."""
        card = next((card for card in self.inventory.gpus if card.uuid == gpu), None)
        return "gpu" if gpu is not None and card is None else device_kind(card)

    def plan(self, spec: InstanceSpec, replica: int, others: Others, destination: Place | None = None) -> WorkerSpec:
        """The spec for one launch, at `destination` if it is given.

        Raises:
            InvalidGpuId: `gpu_id` is not one of the cards.
            NoHost: none of the hosts fits, or the destination has gone.
            InvalidConfig: an extra argument cannot be parsed.
        """
        inventory = self.inventory if destination is None else only_at(self.inventory, destination)
        (host, gpu), _ = decide(spec, inventory, others)
        threads = spec.threads or self.share(others.alive.get(host, 0), host).own
        return worker_spec(spec, self._settings, gpu, threads, replica, host)

    def others(self, spec: InstanceSpec, beside: Sequence[Place]) -> Others:
        """The workers of the fleet as one more of `spec` finds them."""
        memory = self.memory
        known = memory.footprints.known
        return others_in(spec, self.inventory, memory.ledger, self.counts.alive, known, beside, memory.claimed)

    def model_roots(self, spec: InstanceSpec) -> tuple[str, ...] | None:
        """The folders below which its model has to be, where that is a directory."""
        return model_roots(spec, self._settings)

    def accepts(self, spec: InstanceSpec, found: WorkerSpec) -> bool:
        """True if a live worker that was started with `found` could have been started for `spec` now."""
        if found.replica >= self.replicas(spec):
            return False
        hosts = self.inventory.hosts
        on_host = replace(spec, node=found.host) if hosts else spec
        try:
            chosen = place(on_host, self.inventory) if spec.gpu_id is not None else None
            gpu = chosen.uuid if chosen else found.gpu
            same = worker_spec(spec, self._settings, gpu, replica=found.replica, host=found.host).hash == found.hash
        except TeimgrError:
            return False
        if not same or (hosts and not allows(spec, found.host, hosts)) or bool(hosts) != bool(found.host):
            return False
        is_known = not hosts or found.host in {host.name for host in hosts if not host.problem}
        return found.gpu is None or not is_known or found.gpu in {gpu.uuid for gpu in self.inventory.gpus}

    def change_needed(self, old: InstanceSpec, new: InstanceSpec) -> Change:
        """What an update from `old` to `new` needs, by the declared keys and by what the workers are launched with.

        Raises:
            InvalidConfig: an extra argument of `new` cannot be parsed.
        """
        if worker_spec(old, self._settings).hash != worker_spec(new, self._settings).hash:
            return Change.REPLACE
        keys = (name for name in KEYS if name not in WORKER_KEYS and name != "extra_args")
        changed = (KEYS[name].change for name in keys if getattr(old, name) != getattr(new, name))
        return max(changed, default=Change.IN_PLACE)

    def replicas(self, spec: InstanceSpec) -> int:
        return replica_count(spec, self.inventory)

    def share(self, workers: int, host: str = "") -> CpuThreads:
        """CPU threads for each of `workers` workers of a host."""
        found = self._host(host)
        cores = found.cores if found else self._cores
        return CpuThreads(fair_share(cores, workers), cores)

    def load_limit(self, device: str | None) -> int:
        """Return how many workers may load on a card or a host's CPU at a time; the ledger checks whether they fit."""
        if device is None:
            return self._cores
        host = self._host(device)
        return host.cores if host else _LOADS_PER_CARD

    def _host(self, name: str) -> Host | None:
        hosts, by_name = self._hosts
        if hosts is not self.inventory.hosts:  # cached: used at each change of a worker
            hosts, by_name = self._hosts = self.inventory.hosts, {host.name: host for host in self.inventory.hosts}
        return by_name.get(name)

    def index_of(self, gpu: str | None) -> int | None:
        return next((card.index for card in self.inventory.gpus if card.uuid == gpu), None)


def worker_spec(
    spec: InstanceSpec,
    settings: Settings,
    gpu_uuid: str | None = None,
    threads: int = 1,
    replica: int = 0,
    host: str = "",
) -> WorkerSpec:
    """The spec of one worker. `extra_args` take precedence over the instance's fields, these over the settings.

    Without a place it serves to validate the model and to compare two instance specs.

    Raises:
        InvalidConfig: an extra argument cannot be parsed.
    """
    made = WorkerSpec(
        **{name: getattr(spec, name) for name in WORKER_KEYS if name not in _WITH_DEFAULTS},
        **{name: getattr(spec, name) or getattr(settings, name) for name in _WITH_DEFAULTS},
        replica=replica,
        host=host,
        gpu=gpu_uuid,
        threads=threads,
        instance_host=settings.instance_host,
        max_client_batch_size=settings.max_client_batch_size,
        max_message_bytes=settings.grpc_max_message_size_mb * 2**20,
        arrow_output_dtype=settings.arrow_output_dtype,
        media_url_hosts=settings.media_url_hosts,
        media_url_networks=settings.media_url_networks,
        orphan_grace_s=float(settings.orphan_grace_secs),
        nice=settings.cpu_worker_nice if gpu_uuid is None else 0,
        log_level=settings.log_level,
        strict_model_files=settings.strict_model_files,
        model_roots=model_roots(spec, settings),
    )
    if not settings.allow_pickled_weights:
        made = replace(made, safetensors_only=True)
    flags = parse(spec.extra_args)
    return replace(made, auto_truncate_given="auto_truncate" in flags, **flags)


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib << 20


def fair_share(cores: int, workers: int) -> int:
    """CPU threads for each worker: an equal share of the cores, at least one."""
    return max(1, cores // max(1, workers))


def with_batch_tokens(spec: InstanceSpec, inventory: Inventory, per_gib: int) -> InstanceSpec:
    """Set `max_batch_tokens`, where it is 0, to `per_gib` tokens for each free GiB of the card it would be placed on.

    With several replicas the fullest card decides. At least one GiB's worth, at most `GPU_TOKENS_MAX` or that.

    Raises:
        InvalidGpuId: `gpu_id` is not one of the cards.
    """
    if spec.max_batch_tokens:
        return spec
    if spec.gpu_id is None and spec.replicas != 1:
        cards = list(inventory.gpus)
    else:
        try:
            card = place(spec, inventory)
        except NoHost:  # a matching host may join later
            card = None
        cards = [card] if card else []
    free_bytes = min((card.memory_free_bytes for card in cards), default=0)
    by_memory = min(free_bytes * per_gib // _GIB, GPU_TOKENS_MAX)
    tokens = max(per_gib, by_memory) if free_bytes else CPU_TOKENS
    return replace(spec, max_batch_tokens=tokens)


def usable_cores(cpu_max: Path = _CPU_MAX) -> int:
    """The cores of our affinity mask, or the container's CPU quota where that is less; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
        limit = allowed if quota == "max" else max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        limit = allowed
    return max(1, min(allowed, limit))
