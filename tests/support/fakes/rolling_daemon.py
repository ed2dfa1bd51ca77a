"""A daemon-like process for tests that kill it in the midst of a change: a manager over the scripted worker.

    python -m tests.support.fakes.rolling_daemon FOLDER REPLICAS CHANGE

It has an instance `a`, prints a line when all its replicas run, begins to give it the model CHANGE (or a rolling
restart, for `restart`, with a worker that takes long), and waits to be killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from teimgr.config.settings import Settings
from teimgr.directory import Directory
from teimgr.launch.local import LocalLauncher, LocalOptions
from teimgr.observability.metrics import DaemonMetrics
from teimgr.placement.gpus import GpuInventory, Inventory
from teimgr.spec import InstanceSpec
from teimgr.supervision.manager import Manager
from teimgr.supervision.store import Store


async def main(folder: Path, replicas: int, change: str) -> None:
    settings = Settings(
        state_file=folder / "state.toml", instance_port_start=23000, instance_port_end=24000, orphan_grace_secs=20
    )
    directory = Directory()
    options = LocalOptions(
        run_dir=settings.run_dir, log_dir=settings.log_dir, entry="tests.support.fakes.worker:main", preload=()
    )
    gpus = GpuInventory({}, lambda: Inventory(reason="none in this test"))
    manager = Manager(
        settings, LocalLauncher(options), directory, Store(settings.state_file), gpus, DaemonMetrics(), cores=4
    )
    changed = asyncio.Event()
    directory.subscribe(lambda snapshot: changed.set())
    await manager.boot()
    await manager.create(InstanceSpec(name="a", model_id="fake:first-only", replicas=replicas))
    while not all(len(entry.endpoints) == replicas for entry in directory.snapshot().entries):
        changed.clear()
        await changed.wait()
    print("running", flush=True)
    if change == "restart":
        await manager.restart("a", rolling=True)
    elif change:
        await manager.update("a", {"model_id": change})
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
