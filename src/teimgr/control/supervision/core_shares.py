"""Counts of the live workers of the fleet, and the share of its host's cores that each gets of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from teimgr.control.placement.planner import FleetCounts, Planner
from teimgr.control.supervision.instance import ManagedInstance
from teimgr.spec import CpuThreads


class CoreShares:
    """`counts` has the workers of all of `instances`."""

    def __init__(self, planner: Planner, instances: Mapping[str, ManagedInstance]) -> None:
        self.counts = FleetCounts()
        self._planner = planner
        self._instances = instances
        self._shares: dict[str, CpuThreads] = {}

    def count(self, name: str, alive: Counter[str], loading: Counter[str]) -> None:
        """Count the live workers of an instance, and send the workers their share of the cores where it has changed.

        More workers than cores have one core each, so that at most as many as there are cores get a message.
        """
        self.counts.set(name, alive, loading)
        shares = {host: self._planner.share(count, host) for host, count in self.counts.alive.items() if count}
        before, self._shares = self._shares, shares
        if before != shares:
            for each in tuple(self.counts.instances):
                self._instances[each].set_threads(self._share_of)
        elif alive:
            self._instances[name].set_threads(self._share_of)

    def _share_of(self, host: str) -> CpuThreads:
        return self._shares.get(host) or self._planner.share(1, host)
