"""`open_cluster`: the parts of a cluster in the daemon, imported only if the settings have a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teimgr.config.mux import MuxConfig
from teimgr.config.settings import Settings
from teimgr.control.launch.launcher import LocalLauncher
from teimgr.control.placement.hosts import GpuInventory, InventorySource, LeavingHosts
from teimgr.observability.log_source import LogSource
from teimgr.wire.fleet_tls import FleetIdentity
from teimgr.wire.routing.directory import Directory

if TYPE_CHECKING:
    from teimgr.cluster.head import ClusterHead
    from teimgr.cluster.port_forwarding import PortForwarding
    from teimgr.cluster.ray_launcher import RayLauncher, RayMuxHosts


@dataclass(frozen=True, slots=True)
class Cluster:
    """The parts that replace the launcher and the inventory of a single host.

    `identity` is the daemon's, `node_identity` that of its host, for the muxes here. `logs` are those of other hosts.
    """

    launcher: RayLauncher
    inventory: InventorySource
    head: ClusterHead
    identity: FleetIdentity
    node_identity: FleetIdentity
    alarms: Callable[[], Sequence[str]]
    logs: Callable[[], Sequence[LogSource]]
    mux_hosts: Callable[[Sequence[MuxConfig]], RayMuxHosts]
    """The muxes of the other hosts, of the configurations of this host's."""
    forwarding: PortForwarding
    """The instance ports here of workers on other hosts."""


def open_cluster(
    settings: Settings, local: LocalLauncher, cards: GpuInventory, directory: Directory, leaving: LeavingHosts
) -> Cluster | None:
    """The cluster of `[cluster] address`; None without one. Nothing is started; the fleet's authority is made or read.

    Hosts that leave are reported to `leaving`.

    Raises:
        InvalidConfig: ray is not installed, or a name or folder of `[cluster]` cannot be used.
    """
    if not settings.cluster.address:
        return None
    from teimgr.cluster.head import ClusterHead, ClusterInventory
    from teimgr.cluster.port_forwarding import PortForwarding
    from teimgr.cluster.ray_launcher import RayLauncher, RayMuxHosts

    head = ClusterHead(settings, local, cards, leaving)
    launcher = RayLauncher(head, local, settings.cluster.placement_timeout_secs)
    enrolment = head.enrolment

    def mux_hosts(configs: Sequence[MuxConfig]) -> RayMuxHosts:
        wanted = configs if settings.cluster.mux_per_host else ()
        return RayMuxHosts(head, wanted, settings.tls_files, settings.cluster.placement_timeout_secs)

    forwarding = PortForwarding(
        directory, head.host.name, enrolment.identity, local, settings.instance_host, launcher.spec_of, head.services
    )
    return Cluster(
        launcher,
        ClusterInventory(head),
        head,
        enrolment.identity,
        enrolment.node_identity,
        head.alarms,
        head.other_logs,
        mux_hosts,
        forwarding,
    )
