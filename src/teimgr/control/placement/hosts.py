"""The hosts of a cluster as places for workers: which of them an instance may use, and which is the best for the next.

A fleet of one host has no list of hosts, and none of these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from teimgr.errors import NoHost
from teimgr.spec import InstanceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host. `problem` is why it takes no workers now, empty where it does; `versions` are those of packages.

    `disk_free_bytes` are free for models; `clock_ahead_s` is its clock less that of the head, None if unknown.
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
    """Hosts whose workers are to move to others: the head of a cluster reports them, the manager listens."""

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
