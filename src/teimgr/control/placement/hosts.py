"""Hosts and their cards as places for workers: which an instance may use, and which host is the best for the next.

`GpuInventory` reads the cards of this host from NVML; `Preflight` checks that this build of torch has code for them. A
fleet of one host has no list of hosts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import pynvml

from teimgr.control.launch.nursery import TorchBuild
from teimgr.control.launch.process_handle import LaunchFailed
from teimgr.errors import InvalidConfig, NoHost
from teimgr.spec import InstanceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host. `problem` is why it accepts no workers now, or ""; `versions` are those of its packages.

    `disk_free_bytes` is the space for models. `clock_ahead_s` is its clock minus the head's, None if unknown.
    """

    name: str
    address: str = ""
    cores: int = 1
    memory_total_bytes: int = 0
    memory_free_bytes: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    disk_free_bytes: int | None = None
    clock_ahead_s: float | None = None
    problem: str = ""


class LeavingHosts:
    """Hosts whose workers must move: reported by the head of a cluster, watched by the manager."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[str, bool], None]] = []

    def subscribe(self, listener: Callable[[str, bool], None]) -> None:
        """Call `listener` with each such host and whether it was removed, repeatedly until it is gone."""
        self._listeners.append(listener)

    def report(self, host: str, *, was_removed: bool = False) -> None:
        for listener in self._listeners:
            listener(host, was_removed)


def candidates(spec: InstanceSpec, hosts: Sequence[Host]) -> list[Host]:
    """The hosts that `node` and `labels` allow and that take workers.

    Raises:
        NoHost: no host fits; the message has the reason for each.
    """
    refused = {host.name: _refusal(spec, host) for host in hosts}
    fitting = [host for host in hosts if not refused[host.name]]
    if not fitting:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise NoHost(f"no host for '{spec.name}' ({reasons or 'there are no hosts'})")
    return fitting


def allows(spec: InstanceSpec, name: str, hosts: Sequence[Host]) -> bool:
    """True if a live worker of `spec` may stay on the host `name`, whose labels may not be known now."""
    if spec.node is not None and spec.node != name:
        return False
    host = next((host for host in hosts if host.name == name), None)
    return host is None or not _missing_labels(spec, host)


def best_host(spec: InstanceSpec, fitting: Sequence[Host], alive: Mapping[str, int], beside: Mapping[str, int]) -> Host:
    """The host for a worker on the CPU.

    `alive` counts the workers of each host, `beside` the other replicas of the instance. "spread" prefers hosts with
    few of these and then many idle cores, "pack" the opposite, as long as a host has a core for each worker.
    """

    def spread(host: Host) -> tuple[float, ...]:
        return -beside.get(host.name, 0), -alive.get(host.name, 0) / host.cores, host.memory_free_bytes

    def pack(host: Host) -> tuple[float, ...]:
        has_room = alive.get(host.name, 0) < host.cores
        return has_room, beside.get(host.name, 0), alive.get(host.name, 0), -host.memory_free_bytes

    return max(fitting, key=pack if spec.placement == "pack" else spread)


def _refusal(spec: InstanceSpec, host: Host) -> str:
    if spec.node is not None and spec.node != host.name:
        return f"node = {spec.node!r}"
    if missing := _missing_labels(spec, host):
        return f"it lacks {missing}"
    return host.problem


def _missing_labels(spec: InstanceSpec, host: Host) -> str:
    missing = (f"{key} = {value!r}" for key, value in spec.labels.items() if host.labels.get(key) != value)
    return ", ".join(missing)


READING_AGE_S = 1.0
_FAILURE_AGE_S = 10.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. Values that the driver does not report are None; free memory is then 0.

    `node` is its host in a cluster, "" in a fleet of one host; `index` is its number on the host. `memory_of` is the
    memory of each process in bytes by pid; empty if not reported, such as in containers.
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
    """The cards that workers may use; `reason` explains an empty list. `hosts` are the hosts of a cluster.

    `misses_cards`: the host has cards, but CUDA_VISIBLE_DEVICES names none of them.
    """

    gpus: tuple[Gpu, ...] = ()
    reason: str = ""
    hosts: tuple[Host, ...] = ()
    misses_cards: bool = False


class InventorySource(Protocol):
    """Reads the current inventory of this host, or of all hosts of a cluster."""

    async def read(self) -> Inventory:
        """The cards with their free memory, and the hosts of a cluster; soon, as launches wait for it."""


class GpuInventory:
    """Reads the inventory of this host at most once per second, or every 10 seconds without a driver."""

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
    reason = f"CUDA_VISIBLE_DEVICES={visible!r} matches none of the {len(inventory.gpus)} cards"
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


log = logging.getLogger(__name__)

_ARCH = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
# Since torch 2.8, builds for CUDA 12.6 support cards up to this capability, and builds for 12.8 and later do not.
_LAST_OF_CUDA_12_6 = (7, 0)


class Preflight:
    """Compares the cards with the build, once. An unsupported card is an alarm, or an error with mode "fail". So is a
    CUDA_VISIBLE_DEVICES without existing cards, since models would silently run on the CPU."""

    def __init__(
        self, mode: Literal["warn", "fail"], gpus: GpuInventory, build: Callable[[], Awaitable[TorchBuild]]
    ) -> None:
        self._mode = mode
        self._gpus = gpus
        self._build = build
        self._problems: list[str] = []

    @property
    def must_pass(self) -> bool:
        """True if the daemon may serve only after the check has passed."""
        return self._mode == "fail"

    def alarms(self) -> list[str]:
        return self._problems

    async def run(self) -> None:
        """Run the check; without a card it does not wait for the nursery.

        Raises:
            InvalidConfig: with mode "fail", a card cannot be used or is missing, or the build of torch is unknown.
        """
        inventory = await self._gpus.read()
        try:
            if inventory.gpus:
                self._problems = problems(inventory.gpus, await self._build())
            elif inventory.misses_cards:
                self._problems = [f"gpu_preflight: models run on the CPU: {inventory.reason}"]
        except LaunchFailed as error:
            self._problems = [f"gpu_preflight: cannot read the build of torch: {error}"]
        for problem in self._problems:
            log.error(problem)
        if self._problems and self.must_pass:
            raise InvalidConfig("; ".join(self._problems))


def problems(cards: Sequence[Gpu], build: TorchBuild) -> list[str]:
    """A message for each card that `build` has no code for; one of unknown compute capability passes."""
    has = f"supports {' '.join(build.archs)}" if build.cuda else "is a CPU-only build"
    return [
        f"gpu_preflight: GPU {card.index} ({card.name}, sm_{card.compute_capability[0]}{card.compute_capability[1]}) "
        f"is not supported by torch {build.version}, which {has}: {_remedy(card.compute_capability, build)}"
        for card in cards
        if card.compute_capability and not runs_on(card.compute_capability, build.archs)
    ]


def runs_on(capability: tuple[int, int], archs: Sequence[str]) -> bool:
    """True if code for one of `archs` runs on a card of this compute capability.

    Machine code (`sm_`) runs on its own major version from its minor version on (with `a`: on that very one); PTX
    (`compute_`) is compiled for any later card.
    """
    major, minor = capability
    for arch in archs:
        if match := _ARCH.fullmatch(arch):
            kind, has, only = match[1], (int(match[2]), int(match[3])), match[4] == "a"
            if only:
                fits = capability == has
            elif kind == "compute":
                fits = capability >= has
            else:
                fits = major == has[0] and minor >= has[1]
            if fits:
                return True
    return False


def _remedy(capability: tuple[int, int], build: TorchBuild) -> str:
    if build.cuda is None:
        return "install a build of torch for CUDA"
    if capability <= _LAST_OF_CUDA_12_6:
        return "install torch for CUDA 12.6, the last builds with support"
    return f"install torch for a CUDA later than {build.cuda}"
