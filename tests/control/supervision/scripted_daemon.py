"""A daemon-like process for tests that kill it: a manager over the scripted worker.

    FOLDER [--replicas N] [--change MODEL] [name=flags …]

It boots, creates the instances, prints one JSON line {"name": pid} when all replicas run, begins to give each the model
of `--change` (or, for `restart`, a rolling restart), and waits to be killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.fakes.worker import fake_id
from tests.support.fork_server import ForkedProcess, fork_program

from teimgr.config.settings import Settings
from teimgr.control.launch.launcher import LocalLauncher, LocalOptions
from teimgr.control.placement.hosts import GpuInventory, Inventory
from teimgr.control.supervision.manager import Manager
from teimgr.control.supervision.store import Store
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import InstanceSpec
from teimgr.wire.routing.directory import Directory


async def main(folder: Path, wanted: dict[str, str], replicas: int, change: str) -> None:
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
    directory.subscribe(lambda name, entry: changed.set())
    await manager.boot()
    for name, flags in wanted.items():
        await manager.create(InstanceSpec(name=name, model_id=fake_id(flags), replicas=replicas))
    while not all(len(entry.endpoints) == replicas for entry in directory.snapshot().entries):
        changed.clear()
        await changed.wait()
    print(json.dumps({view.spec.name: view.pid for view in manager.list()}), flush=True)
    for name in wanted:
        if change == "restart":
            await manager.restart(name, rolling=True)
        elif change:
            await manager.update(name, {"model_id": change})
    await asyncio.Event().wait()


def run(arguments: list[str]) -> None:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--change", default="")
    parser.add_argument("wanted", nargs="*")
    given = parser.parse_args(arguments[1:])
    asyncio.run(
        main(given.folder, dict(word.partition("=")[::2] for word in given.wanted), given.replicas, given.change)
    )


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[tuple[ForkedProcess | subprocess.Popen[bytes], dict[str, int]]]:
    """The program, forked where it can be, once its instances run, and the pids of their workers; killed behind the
    block.
    """
    read, written = os.pipe()
    command = [sys.executable, "-c", f"import sys, {__name__} as program; program.run(sys.argv)", str(folder)]
    with os.fdopen(read) as output:
        daemon: ForkedProcess | subprocess.Popen[bytes] = fork_program(
            f"{__name__}:run", [str(folder), *arguments], written, folder, {}
        ) or subprocess.Popen([*command, *arguments], stdout=written)
        os.close(written)
        try:
            said = next(line for line in output if line.startswith("{"))  # between what it logs
            yield daemon, json.loads(said)
        finally:
            daemon.kill()
            daemon.wait()
