"""`open_cluster`: the parts of a cluster for the daemon, which are imported only where its settings have one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from teimgr.config.settings import Settings
from teimgr.launch.launcher import Launcher, LocalLauncher
from teimgr.placement.planner import GpuInventory, InventorySource

if TYPE_CHECKING:
    from teimgr.cluster.head import ClusterHead


@dataclass(frozen=True, slots=True)
class Cluster:
    """What takes the place of the launcher and the inventory of one host."""

    launcher: Launcher
    inventory: InventorySource
    head: ClusterHead
    alarms: Callable[[], Sequence[str]]


def open_cluster(settings: Settings, local: LocalLauncher, cards: GpuInventory) -> Cluster | None:
    """The cluster of `[cluster] address`; None without one. Nothing is started.

    Raises:
        InvalidConfig: ray is not installed, or a name or folder of `[cluster]` cannot be used.
    """
    if not settings.cluster.address:
        return None
    from teimgr.cluster.head import ClusterHead
    from teimgr.cluster.inventory import ClusterInventory
    from teimgr.cluster.ray_launcher import RayLauncher

    head = ClusterHead(settings, local, cards)
    launcher = RayLauncher(head, local, settings.cluster.placement_timeout_secs)
    return Cluster(launcher, ClusterInventory(head), head, head.alarms)
