"""What a host says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.cluster import needs_ray

from teimgr.cluster import host_facts
from teimgr.cluster.head import _problem
from teimgr.cluster.host_facts import HostDescription, disk_problem
from teimgr.control.placement.hosts import GpuInventory, Inventory


def test_a_full_disk_is_named_by_the_folder_that_lies_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = (Path("/proc"), tmp_path / "run" / "not made yet")
    monkeypatch.setattr(host_facts, "MIN_FREE_BYTES", 1)
    assert disk_problem(folders[1:]) == ""

    monkeypatch.setattr(host_facts, "MIN_FREE_BYTES", 1 << 60)

    assert disk_problem(folders[1:]).startswith("its disk is full: ")
    assert f"are free in {folders[1]}" in disk_problem(folders[1:])
    assert disk_problem(()) == ""


@needs_ray
async def test_a_host_with_a_full_disk_takes_no_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = GpuInventory({}, lambda: Inventory(reason="none in this test"))
    host = HostDescription("two", {}, cards, (tmp_path,))
    assert _problem(await host.facts(0, draining=False)) == ""

    monkeypatch.setattr(host_facts, "MIN_FREE_BYTES", 1 << 60)

    assert _problem(await host.facts(0, draining=False)).startswith("its disk is full: ")
    assert _problem(await host.facts(0, draining=True)) == "it is leaving"
