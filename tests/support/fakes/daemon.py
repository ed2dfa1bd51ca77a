"""A daemon-like process for tests that kill it: a manager over the scripted worker.

    python -m tests.support.fakes.daemon FOLDER [name=flags …]

It boots, creates the instances, prints one JSON line {"name": pid} when all run, and waits to be killed.
"""

from __future__ import annotations

import asyncio
import json
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


async def main(folder: Path, wanted: dict[str, str]) -> None:
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
    for name, flags in wanted.items():
        await manager.create(InstanceSpec(name=name, model_id=f"fake:{flags}"))
    while not all(entry.endpoints for entry in directory.snapshot().entries):
        changed.clear()
        await changed.wait()
    print(json.dumps({view.spec.name: view.pid for view in manager.list()}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), dict(word.partition("=")[::2] for word in sys.argv[2:])))
