"""The inventory of a cluster: the cards of all hosts, and the hosts themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from teimgr.cluster.head import ClusterHead, Member
from teimgr.cluster.messages import NodeFacts
from teimgr.control.placement.hosts import Host
from teimgr.control.placement.planner import Gpu, Inventory


class ClusterInventory:
    """`InventorySource` of what the head's watch has read last. This host is in it before Ray answers."""

    def __init__(self, head: ClusterHead) -> None:
        self._head = head

    async def read(self) -> Inventory:
        members = dict(self._head.members)
        own = self._head.host.name
        if own not in members:
            facts = await self._head.own_facts()
            members = {own: Member(name=own, ray_id="", address=self._head.address, facts=facts), **members}
        gpus = tuple(
            card for each in members.values() if each.facts and not each.problem for card in _cards(each.facts)
        )
        reasons = [f"{each.name}: {_no_cards(each)}" for each in members.values()]
        return Inventory(gpus, "" if gpus else "; ".join(reasons), tuple(map(_host, members.values())))


def _host(member: Member) -> Host:
    facts = member.facts
    if facts is None:
        return Host(name=member.name, address=member.address, problem=member.problem)
    return Host(
        name=member.name,
        address=member.address,
        cores=max(1, facts.cores),
        memory_total_bytes=facts.memory_total_bytes,
        memory_free_bytes=facts.memory_free_bytes,
        labels=facts.labels,
        versions=asdict(facts.versions),
        disk_free_bytes=facts.disk_free_bytes,
        clock_ahead_s=member.clock_ahead_s,
        problem=member.problem,
    )


def _cards(facts: NodeFacts) -> list[Gpu]:
    return [_card(values, facts.name) for values in facts.cards]


def _card(values: Mapping[str, Any], node: str) -> Gpu:
    """A card whose values have been JSON: without tuples, and with text for the keys of tables."""
    capability = values["compute_capability"]
    memory_of = {int(pid): size for pid, size in values["memory_of"].items()}
    changed = {"compute_capability": tuple(capability) if capability else None, "memory_of": memory_of, "node": node}
    return Gpu(**{**values, **changed})


def _no_cards(member: Member) -> str:
    return member.problem or (member.facts.no_cards_reason if member.facts else "unknown")
