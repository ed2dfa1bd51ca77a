"""A daemon without a cluster imports nothing of it; one without the extra refuses to have one."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.fleet import local_launcher

from teimgr.cluster import host_facts
from teimgr.cluster.opening import open_cluster
from teimgr.config.sections import ClusterSettings
from teimgr.config.settings import Settings
from teimgr.control.placement.hosts import GpuInventory, LeavingHosts
from teimgr.errors import InvalidConfig
from teimgr.wire.routing.directory import Directory

IMPORTED = """
import sys, teimgr.daemon.process
print(*sorted(name for name in sys.modules if name == "ray" or name.startswith("teimgr.cluster.")))
"""


def test_a_fleet_of_one_host_imports_neither_ray_nor_what_uses_it() -> None:
    found = subprocess.run([sys.executable, "-c", IMPORTED], check=True, capture_output=True, text=True, timeout=60)

    assert found.stdout.split() == ["teimgr.cluster.opening"]


async def test_an_address_without_the_extra_is_refused_with_the_command(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(package: str) -> str:
        raise host_facts.PackageNotFoundError(package)

    monkeypatch.setattr(host_facts, "version", missing)
    host_facts.own_versions.cache_clear()
    settings = Settings(state_file=tmp_path / "s.toml", cluster=ClusterSettings(address="127.0.0.2:6379"))  # type: ignore[operator]

    with pytest.raises(InvalidConfig, match=r"cluster\.address: the package ray .*pip install 'teimgr\[cluster\]'"):
        open_cluster(
            settings, local_launcher(settings.state_file.parent), GpuInventory({}), Directory(), LeavingHosts()
        )
    host_facts.own_versions.cache_clear()
