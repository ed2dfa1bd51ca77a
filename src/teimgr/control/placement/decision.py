"""Where one more worker goes: the host, and the card or the CPU.

Pure functions that decide alike for a launch (`planner`), for a plan (`dry_run`) and for a move (`moves`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from teimgr.control.ledger.ledger import Footprint, Ledger, Place
from teimgr.control.placement.gpus import Gpu, Inventory
from teimgr.control.placement.hosts import allows, best_host, candidates
from teimgr.errors import InvalidGpuId, NoHost, ValidationError
from teimgr.spec import InstanceSpec

FootprintOf = Callable[[InstanceSpec, str], Footprint]
"""The footprint of a model on a kind of device."""


@dataclass(frozen=True, slots=True)
class Others:
    """The workers beside which a new one is placed.

    `alive` counts the workers that share the cores of each host, the new one included where it has a host already;
    a fleet of one host has the name "". `free` has what the ledger has left of each card by GPU UUID, `needed` what the
    worker takes of one; `beside` and `beside_hosts` count the other replicas of the instance, by GPU UUID and by host.
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
    """Where a worker goes, and the kind of that device, by which its footprint is known."""

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
        raise ValidationError("node and labels name hosts of a cluster, and the daemon has none ([cluster] address)")
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
        raise NoHost(f"{where.gpu or where.host} is not there any more")
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
