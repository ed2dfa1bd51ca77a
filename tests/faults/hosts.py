"""A fleet of many hosts, simulated: `python -m tests.faults.hosts --hosts 10,50,100 [--report FOLDER]`.

The real manager with its planner, supervisors and state file, and a real mux for each host, fed over real control
sockets; the workers are stand-ins inside this process, which are ready at once, since a thousand real ones do not fit
into one machine. For each size: placement and start of all workers, the size of a snapshot and the time until every mux
has it, the time until every mux has a change, the loss of one host and of a tenth of them, worker events per second,
and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as pytest's `pythonpath` has it

from bench.machine import cpu_s

from teimgr.config.settings import Settings
from teimgr.control.launch.control_link import ControlLink, MuxLink, WorkerStatus
from teimgr.control.launch.launcher import Adopted, FoundWorkers, WorkerHandle
from teimgr.control.launch.mux_launcher import LocalMuxLauncher, local_launcher, mux_config
from teimgr.control.launch.process_handle import Exit, ExitReport, new_incarnation
from teimgr.control.launch.strays import Stray
from teimgr.control.placement.hosts import Gpu, GpuInventory, Inventory
from teimgr.control.placement.planner import place
from teimgr.control.supervision.crash_reports import CrashReports
from teimgr.control.supervision.manager import Manager
from teimgr.control.supervision.muxes import MuxSupervisor
from teimgr.control.supervision.store import Store
from teimgr.errors import Code
from teimgr.mux.process import Mux
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import InstanceSpec, LoadedModel, RouteEntry, State, WorkerSpec
from teimgr.wire.frames import Method
from teimgr.wire.routing.directory import Directory
from tests.faults import long_run
from tests.faults.results import markdown, write

IDLE_S = 20.0
WORKERS_PER_HOST = 10
REPLICAS = 8
CARDS = 8
_MUXES_PER_PROCESS = 25
_CARD_BYTES, _WORKER_BYTES = 80 << 30, 4 << 30
_LIMIT_S = 300.0
_CHANGES = 20
_MODEL = LoadedModel(
    model_id="simulated",
    model_sha=None,
    dtype="bfloat16",
    device="cuda",
    kind="embedding",
    pooling="mean",
    dimension=1024,
    max_input_length=8192,
    max_batch_tokens=65536,
    batching="packed",
)


class SimulatedLink(ControlLink):
    """A control link to a stand-in: its worker is ready, and passes every probe."""

    def __init__(self, status: WorkerStatus, on_status: Callable[[WorkerStatus], None], on_lost: Callable[[], None]):
        super().__init__(on_status, on_lost)
        self._is_open = True
        self._loop.call_soon(on_status, status)

    @property
    def is_open(self) -> bool:
        return self._is_open

    def begin(self, method: Method, payload: bytes = b"", *, timeout_s: float) -> asyncio.Future[bytes]:
        answer = self._loop.create_future()
        answer.set_result(b'{"batches": 1}' if method is Method.PROBE else b"{}")
        return answer

    def notify(self, method: Method, **values: object) -> bool:
        return self._is_open

    def close(self) -> None:
        self._is_open = False


class SimulatedWorker:
    """`WorkerHandle` of a worker that is no process; `end` kills it."""

    def __init__(self, spec: WorkerSpec, number: int, on_gone: Callable[[SimulatedWorker], None]) -> None:
        self.spec = spec
        self.incarnation = new_incarnation()
        self.pid = 10_000_000 + number  # of no process: above the kernel's limit
        self.socket = Path(f"/run/teimgr/{self.incarnation}.sock")
        self.started_at = time.time()
        self.host = (spec.gpu or "").rpartition("-")[0]
        self._number = number
        self._exit: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._on_gone = on_gone

    async def connect(self, on_status: Callable[[WorkerStatus], None], on_lost: Callable[[], None]) -> ControlLink:
        address = f"10.{self._number >> 16}.{self._number >> 8 & 255}.{self._number & 255}:41000"
        status = WorkerStatus(
            "ready", self.pid, self.incarnation, self.spec.hash, _MODEL, node=self.host, address=address
        )
        return SimulatedLink(status, on_status, on_lost)

    async def wait(self) -> Exit:
        return await asyncio.shield(self._exit)

    async def stop(self, grace_s: float, *, sigterm: bool = True) -> Exit:
        self.end(Exit(0))
        return self._exit.result()

    def send_signal(self, number: signal.Signals) -> None:
        pass

    async def activity_s(self) -> float | None:
        return None

    def end(self, exit: Exit) -> None:
        if not self._exit.done():
            self._exit.set_result(exit)
            self._on_gone(self)


class SimulatedLauncher:
    """`Launcher` of stand-ins, which are there at once; `hosts` has those that live."""

    def __init__(self) -> None:
        self.hosts: defaultdict[str, set[SimulatedWorker]] = defaultdict(set)
        self.launched = 0

    async def start(self) -> None:
        pass

    async def launch(self, spec: WorkerSpec) -> WorkerHandle:
        await asyncio.sleep(0)
        self.launched += 1
        worker = SimulatedWorker(spec, self.launched, lambda gone: self.hosts[gone.host].discard(gone))
        self.hosts[worker.host].add(worker)
        return worker

    async def find(self) -> FoundWorkers:
        return FoundWorkers((), ())

    async def adopt(self, workers: Sequence[WorkerHandle], accepts: Callable[[WorkerSpec], bool]) -> list[Adopted]:
        return []

    async def strays(self, owned: Collection[str]) -> Sequence[Stray]:
        return []

    async def close(self) -> None:
        pass

    def lose(self, host: str) -> int:
        """End all workers of a host, as its loss does; the result is their number."""
        lost = tuple(self.hosts.pop(host, ()))
        report = ExitReport(Code.BACKEND_UNAVAILABLE, f"host {host} was lost", permanent=False)
        for worker in lost:
            worker.end(Exit(None, report))
        return len(lost)


class Cards(GpuInventory):
    """The cards of all hosts that are there, as the nodes report them."""

    def __init__(self, hosts: int, launcher: SimulatedLauncher) -> None:
        super().__init__({})
        self.gone: set[str] = set()
        self._launcher = launcher
        self._names = [f"h{number:04}" for number in range(hosts)]

    async def read(self) -> Inventory:
        on_card = Counter(each.spec.gpu for there in self._launcher.hosts.values() for each in there)
        cards = (f"{name}-{card}" for name in self._names if name not in self.gone for card in range(CARDS))
        return Inventory(
            tuple(
                Gpu(index, card, _CARD_BYTES - on_card[card] * _WORKER_BYTES, memory_total_bytes=_CARD_BYTES)
                for index, card in enumerate(cards)
            )
        )


class Simulation:
    """A manager over stand-ins on `hosts` hosts, and the feeds of its muxes."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.workers = hosts * WORKERS_PER_HOST
        self.settings = settings_of(folder, self.workers)
        self.directory = Directory()
        self.launcher = SimulatedLauncher()
        self.cards = Cards(hosts, self.launcher)
        self.metrics = DaemonMetrics()
        self.store = Store(self.settings.state_file)
        self.manager = Manager(
            self.settings, self.launcher, self.directory, self.store, self.cards, self.metrics, cores=64
        )
        crashes = CrashReports(self.settings.log_dir / "crashes")
        self.muxes = [
            MuxSupervisor(local_launcher(number, self.settings), self.directory, self.metrics, crashes)
            for number in range(hosts)
        ]
        self._changed = asyncio.Event()
        self.changes = 0
        self.directory.subscribe(self._on_change)

    def _on_change(self, name: str, entry: RouteEntry | None) -> None:
        self.changes += 1
        self._changed.set()

    async def create(self) -> None:
        """Create the instances, as many calls of REST at a time as a browser would make."""
        names = iter(range(-(-self.workers // REPLICAS)))
        left = self.workers

        async def create() -> None:
            nonlocal left
            for number in names:
                replicas, left = min(REPLICAS, left), left - REPLICAS
                await self.manager.create(InstanceSpec(name=f"i{number:05}", model_id="fake", replicas=replicas))

        await asyncio.gather(*(create() for _ in range(8)))

    async def running(self) -> None:
        """Return when every worker has its route."""
        async with asyncio.timeout(_LIMIT_S):
            while sum(len(entry.endpoints) for entry in self.directory.snapshot().entries) < self.workers:
                self._changed.clear()
                await self._changed.wait()

    async def confirmed(self) -> None:
        """Return when every mux routes by the directory as it is now."""
        async with asyncio.timeout(_LIMIT_S):
            await asyncio.gather(*(mux.routes_confirmed() for mux in self.muxes))

    @asynccontextmanager
    async def feeding(self) -> AsyncIterator[None]:
        """Feed the muxes, which listen already; when it is entered each has the snapshot."""
        feeds = [asyncio.create_task(_feed(mux)) for mux in self.muxes]
        try:
            async with asyncio.timeout(_LIMIT_S):
                while any(mux._routes is None for mux in self.muxes):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                for mux in self.muxes:  # sent is not taken: the answer to the first question is
                    mux._set_routes(-1)
                await self.confirmed()
            yield
        finally:
            for feed in feeds:
                feed.cancel()
            await asyncio.gather(*feeds, return_exceptions=True)

    async def lose(self, hosts: int) -> float:
        """Seconds from the loss of the first hosts until their workers serve elsewhere and every mux has the routes."""
        names = sorted(name for name, there in self.launcher.hosts.items() if there)[:hosts]
        began = time.monotonic()
        self.cards.gone.update(names)
        assert sum(map(self.launcher.lose, names))
        await self._changed_once()
        await self.running()
        await self.confirmed()
        return time.monotonic() - began

    async def _changed_once(self) -> None:
        async with asyncio.timeout(_LIMIT_S):
            while sum(len(entry.endpoints) for entry in self.directory.snapshot().entries) >= self.workers:
                self._changed.clear()
                await self._changed.wait()

    async def storm(self) -> tuple[int, float]:
        """Kill every worker once, host by host; worker events, and the seconds until every mux has their ends."""
        began, launched = time.monotonic(), self.launcher.launched
        for host in sorted(self.launcher.hosts):
            self.launcher.lose(host)
            await asyncio.sleep(0)
        await self._changed_once()
        await self.running()
        await self.confirmed()
        # An exit, a placement, a launch and a ready worker for each.
        return 4 * (self.launcher.launched - launched), time.monotonic() - began


def settings_of(folder: Path, workers: int) -> Settings:
    instances = workers // REPLICAS + 1
    return Settings(
        state_file=folder / "state.toml",
        grpc_port=1,  # not bound: the muxes take a free one
        instance_port_start=20_000,
        instance_port_end=20_000 + 2 * instances,
        restart_backoff_secs=0.01,
        restart_backoff_max_secs=0.05,
        health_check_interval_secs=10,
    )


async def measure(hosts: int) -> dict[str, float]:
    """One size, from creation to the end."""
    with tempfile.TemporaryDirectory(prefix="t") as name:
        folder = Path(name)
        async with AsyncExitStack() as stack:
            simulation = Simulation(folder, hosts)
            simulation.settings.prepare_folders()
            found: dict[str, float] = {"hosts": hosts, "workers": simulation.workers}
            before_mib = _resident_mib()
            await simulation.manager.boot()
            began, used_s = time.monotonic(), time.process_time()
            await simulation.create()
            await simulation.running()
            found["placed_and_routed_s"] = time.monotonic() - began
            found["placed_and_routed_cpu_s"] = time.process_time() - used_s
            print(f"  {hosts} hosts: {simulation.workers} workers are routed", file=sys.stderr)
            found["placement_us_each"] = await _placement_us(simulation)
            found["most_per_host"] = float(max(map(len, simulation.launcher.hosts.values())))
            found["snapshot_kib"] = len(simulation.directory.snapshot().to_json()) / 1024
            farms = await stack.enter_async_context(_farms(folder, hosts))
            idle_mib = [psutil.Process(pid).memory_info().rss / 2**20 for pid in farms]
            began = time.monotonic()
            await stack.enter_async_context(simulation.feeding())
            found["snapshot_to_all_muxes_s"] = time.monotonic() - began
            print(f"  {hosts} hosts: every mux has the snapshot", file=sys.stderr)
            found["change_to_all_muxes_ms"] = await _change_ms(simulation)
            found["one_host_lost_s"] = await simulation.lose(1)
            found["tenth_lost_s"] = await simulation.lose(max(1, hosts // 10))
            print(f"  {hosts} hosts: lost hosts are replaced", file=sys.stderr)
            used_s = time.process_time()
            events, seconds = await simulation.storm()
            found["worker_events_per_s"] = events / seconds
            found["worker_events_per_cpu_s"] = events / (time.process_time() - used_s)
            found["route_changes"] = float(simulation.changes)
            found["daemon_mib_more"] = _resident_mib() - before_mib
            taken_mib = sum(psutil.Process(pid).memory_info().rss / 2**20 for pid in farms) - sum(idle_mib)
            found["mux_mib_more_each"] = taken_mib / hosts
            found |= await _idle(farms, hosts)
            await simulation.manager.shutdown(at_once=True)
    return found


async def _placement_us(simulation: Simulation) -> float:
    """The planner's own time for one worker among all that are there, in µs."""
    planner = simulation.manager._planner
    spec = InstanceSpec(name="one-more", model_id="fake", port=1)
    await planner.refresh()
    began, rounds = time.perf_counter(), 50
    for _ in range(rounds):
        place(spec, planner.inventory)
    return 1e6 * (time.perf_counter() - began) / rounds


async def _change_ms(simulation: Simulation) -> float:
    """The median time from one changed route until every mux has it, in ms."""
    times = []
    entry = simulation.directory.snapshot().entries[0]
    for number in range(_CHANGES):
        began = time.monotonic()
        state = State.STARTING if number % 2 == 0 else State.RUNNING
        simulation.directory.publish(replace(entry, state=state, endpoints=entry.endpoints if number % 2 else ()))
        await simulation.confirmed()
        times.append(time.monotonic() - began)
    return 1000 * sorted(times)[len(times) // 2]


async def _idle(farms: Sequence[int], hosts: int) -> dict[str, float]:
    """Share of a core of this process, which probes workers and polls muxes, and of a mux, while all is calm."""
    own, theirs = time.process_time(), sum(map(cpu_s, farms))
    await asyncio.sleep(IDLE_S)
    return {
        "daemon_idle_percent": 100 * (time.process_time() - own) / IDLE_S,
        "mux_idle_percent_each": 100 * (sum(map(cpu_s, farms)) - theirs) / IDLE_S / hosts,
    }


def _resident_mib() -> float:
    return psutil.Process().memory_info().rss / 2**20


async def _feed(mux: MuxSupervisor) -> None:
    assert isinstance(mux.launcher, LocalMuxLauncher)
    link = await MuxLink.open(mux.launcher.config.control_socket, _LIMIT_S)
    try:
        await mux._feed_by(link)
    finally:
        link.close()


@asynccontextmanager
async def _farms(folder: Path, hosts: int) -> AsyncIterator[list[int]]:
    """Processes with a mux for each host; their pids, once all muxes listen."""
    processes = []
    try:
        for first in range(0, hosts, _MUXES_PER_PROCESS):
            numbers = json.dumps([*range(first, min(hosts, first + _MUXES_PER_PROCESS))])
            command = [sys.executable, "-m", "tests.faults.hosts", "--farm", str(folder), numbers]
            processes.append(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE))
        async with asyncio.timeout(_LIMIT_S):
            for process in processes:
                assert process.stdout is not None
                assert await process.stdout.readline()
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def farm(folder: Path, numbers: Sequence[int]) -> None:
    """Run the muxes of these numbers in this process until it is killed; prints a line when all listen."""
    settings = settings_of(folder, 0)
    muxes = [Mux(replace(mux_config(number, settings), port=0, processes=1)) for number in numbers]
    running = [asyncio.create_task(mux.run()) for mux in muxes]
    while not all(Path(mux._config.control_socket).exists() for mux in muxes):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    print("listening", flush=True)
    await asyncio.gather(*running)


def report(results: list[dict[str, float]]) -> list[str]:
    """A line for each figure, a column for each size, and the growth from the first to the last."""
    rows: list[tuple[Any, ...]] = []
    for name in results[0]:
        if name == "hosts":
            continue
        values = [result.get(name, float("nan")) for result in results]
        growth = f"×{values[-1] / values[0]:.1f}" if values[0] else "–"
        rows.append((name.replace("_", " "), *values, growth))
    sizes = [f"{result['hosts']:.0f} hosts" for result in results]
    return ["Stand-ins for workers, real planner, supervisors and muxes.", "", *markdown(("", *sizes, "growth"), rows)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hosts", description=__doc__)
    parser.add_argument("--hosts", default="10,50,100", help="sizes, with commas between (10,50,100)")
    parser.add_argument("--report", type=Path, help="folder for hosts.json and hosts.md")
    parser.add_argument("--farm", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.disable(logging.ERROR)  # a line for each of some thousand crashes
    if options.farm:
        uvloop.run(farm(Path(options.farm[0]), json.loads(options.farm[1])))
        return 0
    results = []
    for size in options.hosts.split(","):
        results.append(uvloop.run(measure(int(size))))
        print({name: round(value, 2) for name, value in results[-1].items()}, flush=True)
    lines = report(results)
    print("\n".join(lines))
    if options.report:
        write(options.report, "hosts", "A fleet of many hosts, simulated", lines, {"sizes": results})
    return 0


if __name__ == "__main__":
    sys.exit(long_run.run(main))
