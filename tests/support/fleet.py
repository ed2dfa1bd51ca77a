"""A real nursery, real processes, a scripted worker; and a count of what is left afterwards."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.support.fakes.worker import fake_id
from tests.support.fork_server import forked_nursery, scripted_server, server_pids

from teimgr.config.settings import Settings
from teimgr.control.events.fleet_events import EventLog
from teimgr.control.launch.launcher import LocalLauncher, LocalOptions
from teimgr.control.launch.process_handle import look_up
from teimgr.control.placement.hosts import GpuInventory, Inventory, InventorySource, LeavingHosts
from teimgr.control.supervision.manager import Manager
from teimgr.control.supervision.store import Store
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import InstanceSpec, InstanceView, RouteEntry
from teimgr.wire.routing.directory import Directory

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0
# What a daemon may leave in its run directory.
RESIDENT = {"nursery.log", "nursery.run", "standby.run", "daemon.lock"}


_others: set[int] = set()


@pytest.fixture(autouse=True)
def _note_others() -> None:
    """Daemons that tests of other folders share may run on in this process, and the server of `forked_nursery`."""
    scripted_server()
    _others.clear()
    _others.update(child.pid for child in psutil.Process().children(recursive=True))


def children() -> list[psutil.Process]:
    """Processes that this test left behind."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if child.pid not in _others | server_pids and child.is_running()]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path: a unix socket's may have 107 bytes."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    path = Path(tempfile.mkdtemp(prefix="t"))
    yield path
    shutil.rmtree(path)


def local_launcher(folder: Path, **options: object) -> LocalLauncher:
    """A launcher whose nursery forks the scripted worker and imports nothing."""
    values = {
        "run_dir": folder / "run",
        "log_dir": folder / "logs",
        "entry": "tests.support.fakes.worker:main",
        "preload": (),
    }
    return LocalLauncher(LocalOptions(**(values | options)))  # type: ignore[arg-type]


@pytest.fixture
async def launcher(folder: Path) -> AsyncIterator[LocalLauncher]:
    """Started; closed at the end."""
    made = local_launcher(folder)
    await made.start()
    yield made
    await made.close()


@dataclass
class Fleet:
    """A manager over its own folder, and eyes on it. Its nursery is a copy of one, as imports take long."""

    folder: Path
    settings: Settings
    directory: Directory = field(default_factory=Directory)
    metrics: DaemonMetrics = field(default_factory=DaemonMetrics)
    pids: set[int] = field(default_factory=set)
    inventory: InventorySource | None = None
    """Of a cluster; without it there are no cards and no other hosts."""
    events: EventLog = field(default_factory=EventLog)
    leaving: LeavingHosts = field(default_factory=LeavingHosts)

    def __post_init__(self) -> None:
        self.launcher = local_launcher(self.folder)
        nursery = self.launcher.nursery
        nursery._spawn = partial(forked_nursery, nursery)  # type: ignore[method-assign]
        gpus = self.inventory or GpuInventory({}, lambda: Inventory(reason="none in this test"))
        self.store = Store(self.settings.state_file)
        self.manager = Manager(
            self.settings,
            self.launcher,
            self.directory,
            self.store,
            gpus,
            self.metrics,
            cores=4,
            events=self.events,
            leaving=self.leaving,
        )
        self._changed = asyncio.Event()
        self.directory.subscribe(self._on_change)

    def _on_change(self, name: str, entry: RouteEntry | None) -> None:
        self._changed.set()

    async def create(self, flags: str = "", name: str = "a", **values: object) -> InstanceView:
        return await self.manager.create(InstanceSpec(name=name, model_id=fake_id(flags), **values))  # type: ignore[arg-type]

    async def running(self, name: str = "a", *, not_pid: int | None = None) -> InstanceView:
        """The view once it runs, in a process other than `not_pid`."""
        await self.until(lambda entry: bool(entry.endpoints) and self.manager.get(name).pid != not_pid, name)
        view = self.manager.get(name)
        assert view.pid is not None
        self.pids.add(view.pid)
        return view

    async def until(self, holds: Callable[[RouteEntry], bool], name: str = "a") -> RouteEntry:
        """The instance's entry in the directory once it is as wanted."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                self._changed.clear()
                for entry in self.directory.snapshot().entries:
                    if entry.name == name and holds(entry):
                        return entry
                await self._changed.wait()

    def entry(self, name: str = "a") -> RouteEntry:
        return next(entry for entry in self.directory.snapshot().entries if entry.name == name)

    def left_over(self) -> set[str]:
        """Files of workers in the run directory."""
        return {path.name for path in self.settings.run_dir.iterdir()} - RESIDENT

    async def end(self) -> None:
        await self.manager.shutdown(at_once=True)
        await self.launcher.close()


def settings_for(folder: Path, **values: object) -> Settings:
    """Quick figures, own ports."""
    quick: dict[str, object] = {
        "state_file": folder / "state.toml",
        "restart_backoff_secs": 0.01,
        "restart_backoff_max_secs": 0.05,
        "health_check_interval_secs": 1,
        "health_probe_timeout_secs": 1,
        "orphan_grace_secs": 20,
        "instance_port_start": 23000,
        "instance_port_end": 24000,
    }
    return Settings(**(quick | values))  # type: ignore[arg-type]


@pytest.fixture
async def fleets(folder: Path) -> AsyncIterator[Callable[..., Fleet]]:
    """Makes fleets over one folder, one after the other; afterwards no process of theirs is alive."""
    made: list[Fleet] = []

    def make(**values: object) -> Fleet:
        made.append(Fleet(folder, settings_for(folder, **values)))
        return made[-1]

    yield make
    for fleet in made:
        await fleet.end()
    assert not children()
    assert not {pid for fleet in made for pid in fleet.pids if look_up(pid)}


@pytest.fixture
async def fleet(fleets: Callable[..., Fleet]) -> Fleet:
    """One, booted."""
    made = fleets()
    await made.manager.boot()
    return made
