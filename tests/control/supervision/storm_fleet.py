"""A manager over workers that exist in memory alone: every wait takes a drawn number of turns of the event loop.

So one seed is one interleaving, and thousands take seconds. `StormFleet.workers` are the processes that live, whatever
the manager knows of them.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import signal
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tests.support.fleet import settings_for

from teimgr.control.launch.control_link import WorkerStatus
from teimgr.control.launch.launcher import Adopted, FoundWorkers, WorkerHandle
from teimgr.control.launch.process_handle import Exit, ExitReport, LaunchFailed
from teimgr.control.launch.strays import Stray
from teimgr.control.placement.hosts import GpuInventory, Inventory
from teimgr.control.supervision.manager import Manager
from teimgr.control.supervision.store import Loaded
from teimgr.errors import Code, Unavailable
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import InstanceSpec, State, WorkerSpec
from teimgr.wire.routing.directory import Directory

MAX_TURNS = 5000
"""Until a fleet without commands has to be at rest."""


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes on at once where every task waits for a time, so that no wait lasts.

    While a thread works for a task the clock stands, and the loop waits for the thread.
    """

    def __init__(self) -> None:
        super().__init__(_SkippingSelector(self))
        self.passed_s = 0.0
        self.works_in_threads = 0

    def time(self) -> float:
        return self.passed_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        self.works_in_threads += 1
        found = super().run_in_executor(executor, func, *args)
        found.add_done_callback(self._thread_is_done)
        return found

    def _thread_is_done(self, found: asyncio.Future[Any]) -> None:
        self.works_in_threads -= 1


class _SkippingSelector(selectors.DefaultSelector):
    def __init__(self, loop: SkippingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0 or self._loop.works_in_threads:
            return super().select(timeout)
        if not (found := super().select(0)):
            self._loop.passed_s += timeout
        return found


class Turns:
    """Waits of a drawn length: mostly none or a few turns of the event loop."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    async def some(self, most: int = 6) -> None:
        for _ in range(self.rng.randrange(most)):
            await asyncio.sleep(0)


class StormStore:
    """Keeps the state in memory; `refuses` is the part of the writes that fail."""

    def __init__(self, rng: random.Random, refuses: float = 0.0) -> None:
        self.specs: list[InstanceSpec] = []
        self._rng = rng
        self._refuses = refuses

    def open(self) -> None:
        """Nothing to lock."""

    def close(self) -> None:
        """Nothing to release."""

    def load(self) -> Loaded:
        return Loaded(tuple(self.specs), None)

    def save(self, specs: Sequence[InstanceSpec]) -> None:
        if self._rng.random() < self._refuses:
            raise OSError(28, "No space left on device")
        self.specs = list(specs)


class StormLink:
    """A control link; commands on it take a drawn time."""

    def __init__(self, worker: StormWorker, on_lost: Callable[[], None]) -> None:
        self.is_open = True
        self._worker = worker
        self.on_lost = on_lost

    def close(self) -> None:
        self.is_open = False

    def notify(self, *args: Any, **values: Any) -> bool:
        return True

    async def drain(self, grace_s: float, *, handover: bool, timeout_s: float) -> None:
        await self._worker.turns.some()
        if not self._worker.is_alive:
            raise Unavailable("it is gone")
        self._worker.end(0)

    async def call(self, *args: Any, **values: Any) -> bytes:
        await self._worker.turns.some()
        return b'{"taken": 0, "calls": 0}'

    def begin(self, *args: Any, **values: Any) -> asyncio.Future[bytes]:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        answer.set_result(b'{"batches": 0}')
        return answer


class StormWorker:
    """`WorkerHandle` of a process in memory."""

    def __init__(self, launcher: StormLauncher, spec: WorkerSpec, number: int) -> None:
        self.spec = spec
        self.pid = number
        self.incarnation = f"{number:012x}"
        self.socket = Path(f"/run/{self.incarnation}.sock")
        self.started_at = float(number)
        self.turns = launcher.turns
        self._launcher = launcher
        self._gone = asyncio.Event()
        self._exit = Exit(0)
        self._links: list[tuple[StormLink, Callable[[WorkerStatus], None]]] = []
        self._loading = asyncio.ensure_future(self._load())

    @property
    def is_alive(self) -> bool:
        return not self._gone.is_set()

    def status(self, state: str) -> WorkerStatus:
        return WorkerStatus(state, self.pid, self.incarnation, self.spec.hash)

    async def _load(self) -> None:
        await self.turns.some(12)
        if self.turns.rng.random() < self._launcher.crashes:
            self._exit = Exit(None, ExitReport(Code.INTERNAL_ERROR, "it fell over", permanent=False))
            self.end(0)
            return
        for link, on_status in self._links:
            if link.is_open:
                on_status(self.status("ready"))

    async def connect(self, on_status: Callable[[WorkerStatus], None], on_lost: Callable[[], None]) -> Any:
        await self.turns.some()
        if not self.is_alive:
            raise Unavailable("it is gone")
        link = StormLink(self, on_lost)
        self._links.append((link, on_status))
        on_status(self.status("ready" if self._loading.done() else "loading"))
        return link

    def end(self, status: int) -> None:
        if self.is_alive:
            self._gone.set()
            self._loading.cancel()
            self._launcher.workers.discard(self)
            for link, _ in self._links:
                link.on_lost()

    async def wait(self) -> Exit:
        await self._gone.wait()
        await self.turns.some()
        return self._exit

    async def stop(self, grace_s: float, *, sigterm: bool = True) -> Exit:
        await self.turns.some(4 if grace_s == 0 else 16)
        self.end(-9)
        return await self.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """No effect."""


@dataclass
class StormLauncher:
    """`Launcher` of workers in memory; a part of the launches fails, a part of the workers crashes."""

    rng: random.Random
    fails: float = 0.0
    crashes: float = 0.0
    workers: set[StormWorker] = field(default_factory=set)
    was_killed: bool = False
    """The daemon is: a cancelled launch does not clean up after itself."""

    def __post_init__(self) -> None:
        self.turns = Turns(self.rng)
        self._numbers = count(1)

    async def start(self) -> None:
        """Nothing to prepare."""

    async def launch(self, spec: WorkerSpec) -> StormWorker:
        """As `LocalLauncher.launch`: the fork itself cannot be cancelled, and its worker is ended then."""
        await self.turns.some()
        forking = asyncio.ensure_future(self._fork(spec))
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            await asyncio.wait({forking})
            if not self.was_killed and not forking.cancelled() and not forking.exception():
                await forking.result().stop(0)
            raise

    async def _fork(self, spec: WorkerSpec) -> StormWorker:
        await self.turns.some()
        if self.rng.random() < self.fails:
            raise LaunchFailed("no process left")
        worker = StormWorker(self, spec, next(self._numbers))
        self.workers.add(worker)
        await self.turns.some()
        return worker

    async def find(self) -> FoundWorkers:
        await self.turns.some()
        return FoundWorkers(list(self.workers), [])

    async def adopt(self, workers: Sequence[WorkerHandle], accepts: Callable[[WorkerSpec], bool]) -> list[Adopted]:
        found: dict[int, Adopted] = {}
        wanted = [each for each in workers if accepts(each.spec)]
        await self.turns.some(30)
        for worker in wanted:
            assert isinstance(worker, StormWorker)
            if worker.is_alive:
                status = worker.status("ready" if worker._loading.done() else "loading")
                found.setdefault(worker.spec.replica, Adopted(worker, status))
        kept = {each.handle for each in found.values()}
        await asyncio.gather(*(each.stop(0) for each in workers if each not in kept))
        return list(found.values())

    async def strays(self, owned: Collection[str]) -> list[Stray]:
        """As the protocol."""
        return [
            Stray(worker.incarnation, worker.spec.name, worker.pid, partial(worker.stop, 0))
            for worker in self.workers
            if worker.incarnation not in owned
        ]

    async def close(self) -> None:
        """Nothing to release."""


class StormFleet:
    """A manager and what it manages, all in memory."""

    def __init__(self, folder: Path, rng: random.Random, launcher: StormLauncher, store: StormStore) -> None:
        self.launcher = launcher
        self.turns = launcher.turns
        self.store = store
        self._folder, self._rng = folder, rng
        settings = settings_for(folder, restart_backoff_secs=0, restart_backoff_max_secs=0, max_instances=None)
        gpus = GpuInventory({}, lambda: Inventory(reason="none in this test"))
        directory = Directory()
        directory.confirm_by(self.turns.some)
        self.manager = Manager(settings, launcher, directory, store, gpus, DaemonMetrics(), cores=4)  # type: ignore[arg-type]

    def problems(self) -> list[str]:
        """How the processes that live differ from those that are wanted."""
        living = Counter(worker.spec.name for worker in self.launcher.workers)
        owned = {each.pid for view in self.manager.list() for each in view.workers if each.pid}
        found = [f"worker {w.pid} of {w.spec.name} is in no list" for w in self.launcher.workers if w.pid not in owned]
        for view in self.manager.list():
            wanted = int(view.spec.replicas) if view.spec.wanted_running else 0
            if view.spec.wanted_running and view.state is State.FAILED:
                continue
            if living[view.spec.name] != wanted:
                found.append(f"{view.spec.name}: {living[view.spec.name]} workers live, {wanted} are wanted")
            elif view.spec.wanted_running and view.state is not State.RUNNING:
                found.append(f"{view.spec.name} is {view.state.value}")
        found += [f"{spec.name} is in the state file" for spec in self.store.specs if spec.name not in self._names()]
        return found

    def _names(self) -> set[str]:
        return {view.spec.name for view in self.manager.list()}

    async def rest(self) -> list[str]:
        """The problems that remain once nothing changes any more."""
        for _ in range(MAX_TURNS):
            await asyncio.sleep(0)
            if not (found := self.problems()):
                break
        return found

    async def killed(self) -> StormFleet:
        """The fleet of the next daemon, after this one was killed: its tasks end, and its workers live on."""
        here = asyncio.current_task()
        of_workers = {each._loading for each in self.launcher.workers}
        tasks = [task for task in asyncio.all_tasks() if task is not here and task not in of_workers]
        self.launcher.was_killed = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.launcher.was_killed = False
        return StormFleet(self._folder, self._rng, self.launcher, self.store)
