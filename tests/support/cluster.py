"""A Ray of one host for tests: shared by the tests of a module, each of which is another daemon on it."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemon_process import HEAD_ADDRESS, cluster_table, kill_ray
from tests.support.fleet import LIMIT_S, ROOT, local_launcher

from teimgr.cluster.head import ClusterHead
from teimgr.cluster.ray_launcher import RayLauncher
from teimgr.config.cluster import ClusterSettings
from teimgr.config.settings import Settings
from teimgr.control.placement.hosts import LeavingHosts
from teimgr.control.placement.planner import GpuInventory, Inventory

NODE_ADDRESS = "127.0.0.3"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


class OneHost:
    """The folder and the settings of a cluster of one host; `launcher` makes a daemon's part of it.

    `settings` are more of `[cluster]`.
    """

    def __init__(self, **settings: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="t"))
        self._heads: list[ClusterHead] = []
        cluster = ClusterSettings(**cluster_table(HEAD_ADDRESS, "one", **settings))
        self.settings = Settings(state_file=self.folder / "state.toml", cluster=cluster)

    def launcher(self, placement_limit_s: float = 30.0) -> tuple[ClusterHead, RayLauncher]:
        local = local_launcher(self.folder)
        cards = GpuInventory({}, lambda: Inventory(reason="none in this test"))
        head = ClusterHead(self.settings, local, cards, LeavingHosts())
        self._heads.append(head)
        return head, RayLauncher(head, local, placement_limit_s)

    def close(self) -> None:
        kill_ray(self.settings.run_dir)
        for head in self._heads:  # the first one's child: a daemon would have ended before it
            handle = head._ray._handle if head._ray else None
            if handle is not None and handle._child is not None:
                handle._child.wait(LIMIT_S)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def one_host() -> Iterator[OneHost]:
    """One Ray for the tests of a module; its actors fork the scripted worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
        host = OneHost()
        yield host
        host.close()
