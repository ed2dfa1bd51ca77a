"""A Ray of one host for tests: shared by the tests of a module, each of which is another daemon on it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.daemon_process import free_ports
from tests.support.fleet import LIMIT_S, ROOT, local_launcher
from tests.support.polling import until

from teimgr.cluster.head import ClusterHead
from teimgr.cluster.ray_launcher import RayLauncher
from teimgr.config.cluster import ClusterSettings
from teimgr.config.settings import Settings
from teimgr.launch.process_handle import look_up
from teimgr.placement.planner import GpuInventory, Inventory

HEAD_ADDRESS, NODE_ADDRESS = "127.0.0.2", "127.0.0.3"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


def kill_ray(run_dir: Path) -> None:
    """Kill the Ray whose run file lies there, and wait until it is gone."""
    path = run_dir / "ray.run"
    if path.exists():
        pid = json.loads(path.read_text())["pid"]
        if look_up(pid):
            os.kill(pid, signal.SIGKILL)
            until(lambda: not look_up(pid), "the end of Ray")


class OneHost:
    """The folder and the settings of a cluster of one host; `launcher` makes a daemon's part of it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="t"))
        self._heads: list[ClusterHead] = []
        (port,) = free_ports(1)
        address = f"{HEAD_ADDRESS}:{port}"
        self.settings = Settings(
            state_file=self.folder / "state.toml", cluster=ClusterSettings(address=address, node="one")
        )

    def launcher(self, placement_limit_s: float = 30.0) -> tuple[ClusterHead, RayLauncher]:
        local = local_launcher(self.folder)
        head = ClusterHead(self.settings, local, GpuInventory({}, lambda: Inventory(reason="none in this test")))
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
