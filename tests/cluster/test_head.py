"""The watch of a cluster's hosts, over a bridge in memory."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.fleet import local_launcher
from tests.support.polling import eventually

from teimgr.cluster import head as module
from teimgr.cluster import host_facts
from teimgr.cluster.bridge import Bridge
from teimgr.cluster.head import ClusterHead
from teimgr.cluster.messages import NodeFacts, Versions
from teimgr.config.sections import ClusterSettings
from teimgr.config.settings import Settings
from teimgr.control.placement.hosts import GpuInventory, Inventory, LeavingHosts

VERSIONS = Versions(teimgr="0", ray="0", python="0", torch="0")


def host(ray_id: str, address: Any, name: str) -> dict[str, Any]:
    facts = NodeFacts(
        name=name,
        versions=VERSIONS,
        labels={},
        cores=1,
        memory_total_bytes=1,
        memory_free_bytes=1,
        service=f"{address}:1",
    )
    return {"id": ray_id, "address": address, "facts": facts.to_dict(), "clock_ahead_s": 0.0}


class MemoryBridge:
    """Lists `hosts`, as Ray has them."""

    problem = ""

    def __init__(self) -> None:
        self.connected = asyncio.Event()
        self.connected.set()
        self.hosts: list[Any] = [host("a", "127.0.0.2", "one"), host("b", "10.0.0.3", "two")]

    async def call(self, op: str, **arguments: Any) -> Any:
        return self.hosts


@pytest.fixture
def bridge() -> MemoryBridge:
    return MemoryBridge()


@pytest.fixture
def head(tmp_path: Path, bridge: MemoryBridge, monkeypatch: pytest.MonkeyPatch) -> ClusterHead:
    for each in (module, host_facts):
        monkeypatch.setattr(each, "own_versions", lambda: VERSIONS)
    monkeypatch.setattr(module, "WATCH_INTERVAL_S", 0.01)
    settings = Settings(
        state_file=tmp_path / "state.toml", cluster=ClusterSettings(address="127.0.0.2:6379", node="one")
    )
    cards = GpuInventory({}, lambda: Inventory(reason="none"))
    made = ClusterHead(settings, local_launcher(tmp_path), cards, LeavingHosts())
    for name in ("two", "three"):
        made.enrolment.enrolment.redeem(made.enrolment.enrolment.create_token("f" * 64), name)
    made.bridge = cast("Bridge", bridge)
    return made


async def test_the_watch_goes_on_after_a_value_that_is_not_expected(head: ClusterHead, bridge: MemoryBridge) -> None:
    """It ended for good, without an alarm: no host joined, left or was lost any more."""
    watching = asyncio.create_task(head._keep_watching())
    try:
        bridge.hosts.append(None)
        await eventually(lambda: any("hosts are not watched: TypeError" in each for each in head.alarms()))
        assert not watching.done()

        bridge.hosts[-1] = host("c", "gpu3.internal", "three")
        await eventually(lambda: set(head.members) == {"one", "two", "three"})
        assert not any("not watched" in each for each in head.alarms())
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


@pytest.mark.parametrize("former", ["0", "z"])
async def test_of_a_host_whose_ray_was_started_again_the_present_one_counts(
    head: ClusterHead, bridge: MemoryBridge, former: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In half of the cases, by a random id, the dead one did, and the host took no workers meanwhile."""
    bridge.hosts[1]["id"] = former
    await head.refresh()
    del bridge.hosts[1]["facts"]  # it does not answer any more
    bridge.hosts.append(host("m", "10.0.0.4", "two"))

    for _ in range(3):
        await head.refresh()

    assert (head.members["two"].ray_id, head.members["two"].problem) == ("m", "")
    assert caplog.text.count("two hosts have one name") == 1
    assert head.alarms()[-1:] == ["cluster: two hosts are named two: the one at 10.0.0.3 gets no workers"]
    del bridge.hosts[1]
    await head.refresh()
    assert set(head.members) == {"one", "two"}
    assert not any("two hosts" in each for each in head.alarms())
