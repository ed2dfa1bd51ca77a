"""Launching and adopting workers: the protocols `Launcher` and `WorkerHandle`, which supervision uses, and the launcher
for this host, which forks workers from the nursery."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from teimgr.control.launch import nursery
from teimgr.control.launch.control_link import ControlLink, WorkerStatus, first_status
from teimgr.control.launch.nursery_link import Ending, NurseryDied, NurseryLink
from teimgr.control.launch.process_handle import (
    LOCK_FILE,
    Exit,
    ExitReport,
    LaunchFailed,
    ProcessHandle,
    WorkerPaths,
    WorkerRunFile,
    all_worker_paths,
    boot_id,
    keep_room,
    make_private,
    new_incarnation,
    open_pidfd,
    socket_fits,
    unrecorded_workers,
)
from teimgr.control.launch.shared_ports import JoinedPort, borrow_ports, listen_at
from teimgr.control.launch.strays import Stray, without_handle
from teimgr.control.ledger.system_memory import CgroupMemory, MemoryKills
from teimgr.errors import Code, InvalidConfig, TeimgrError, Unavailable
from teimgr.files import file_size, lock_file
from teimgr.http.server import address_of, bind
from teimgr.observability.logs import LogSpan, last_warning, open_log, rotate_regularly
from teimgr.spec import LINK_LISTENER, WorkerSpec
from teimgr.worker.connection_queue import RECEIVE_END, SEND_END, ConnectionQueue

CANCEL_LIMIT_S = 2.0
IDENTITY_LIMIT_S = 5.0
LEFTOVER_GRACE_S = 5.0
_BACKLOG = 128
_STATUS_LIMIT_S = 2.0

log = logging.getLogger(__name__)


class WorkerHandle(Protocol):
    """A worker process started with `spec`. `started_at` is in seconds since the epoch."""

    spec: WorkerSpec
    incarnation: str
    pid: int
    socket: Path
    started_at: float

    async def connect(self, on_status: Callable[[WorkerStatus], None], on_lost: Callable[[], None]) -> ControlLink:
        """A new control link to the worker, wherever it runs. Raises as `ControlLink.open`."""

    async def wait(self) -> Exit:
        """Return when the process is gone and its files are removed. Any number may wait."""

    async def stop(self, grace_s: float, *, sigterm: bool = True) -> Exit:
        """End the process and all its children; return when it is gone.

        SIGTERM (not with `sigterm` false, where DRAIN was sent on its link), `grace_s`, SIGKILL for its group. May be
        called again with less grace to cut the first call short.

        Raises:
            LaunchFailed: it is still there some time after SIGKILL.
        """

    def send_signal(self, number: signal.Signals) -> None:
        """No effect once it is gone."""

    async def activity_s(self) -> float | None:
        """Processor time that its threads had or waited for, in seconds; None if unknown.

        Evidence of life that a call which holds its event loop and its GIL cannot stop.
        """


@dataclass(frozen=True, slots=True)
class EndedWorker:
    """A worker that was killed or failed while no daemon ran. `started_at` is in seconds since the epoch."""

    instance: str
    spec: WorkerSpec | None
    pid: int
    started_at: float
    exit: Exit


@dataclass(frozen=True, slots=True)
class FoundWorkers:
    """The workers of an earlier daemon: live ones, and those killed or failed since it ended."""

    alive: Sequence[WorkerHandle]
    ended: Sequence[EndedWorker]


@dataclass(frozen=True, slots=True)
class Adopted:
    """A live worker of an earlier daemon, with its current status."""

    handle: WorkerHandle
    status: WorkerStatus


class Launcher(Protocol):
    """Starts workers and finds those of an earlier daemon."""

    async def start(self) -> None:
        """Prepare, once; returns before slow preparations end.

        Raises:
            InvalidConfig: the run directory cannot be used, or another daemon uses it.
        """

    async def launch(self, spec: WorkerSpec) -> WorkerHandle:
        """Start a worker; its socket already accepts connections. A cancelled launch leaves no process behind.

        Raises:
            LaunchFailed: it could not be started.
        """

    async def find(self) -> FoundWorkers:
        """The workers of an earlier daemon. The files of dead ones are removed, so a second call has none that ended.

        Raises:
            Unavailable: a run file cannot be read now, for lack of descriptors or by a failing disk.
        """

    async def adopt(self, workers: Sequence[WorkerHandle], accepts: Callable[[WorkerSpec], bool]) -> list[Adopted]:
        """Of these workers, which `find` found, those that answer and whose spec `accepts`, at most one per replica.

        All others are ended; those of an instance that has one of these leave it their ports and end on their own.
        """

    async def strays(self, owned: Collection[str]) -> Sequence[Stray]:
        """Live workers of instances that are not among `owned`, incarnations; some may be about to get an owner.

        Raises:
            TeimgrError, OSError: they cannot be looked for now.
        """

    async def close(self) -> None:
        """Release everything; the workers continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """Folders, limits of log files, and the nursery's imports and entry point."""

    run_dir: Path
    log_dir: Path
    log_max_bytes: int = 10 << 20
    log_keep: int = 3
    entry: str = nursery.ENTRY
    preload: tuple[str, ...] = nursery.PRELOAD


class LocalWorker(ProcessHandle):
    """`WorkerHandle` of a process on this host. `ending` is from the nursery, None if adopted."""

    def __init__(
        self,
        spec: WorkerSpec,
        paths: WorkerPaths,
        pid: int,
        pidfd: int,
        started_at: float,
        log_path: Path,
        ending: asyncio.Future[Ending | None] | None,
        kills: MemoryKills,
        log_start: int = 0,
    ) -> None:
        super().__init__(pid, pidfd)
        self.spec = spec
        self.incarnation = paths.incarnation
        self.socket = paths.socket
        self.started_at = started_at
        self.log_path = log_path
        self._paths = paths
        self._ending = ending
        self._kills = kills
        self._cgroup = CgroupMemory(pid)
        self._peak_bytes = 0
        self._log_start = log_start
        kills.watch(self._cgroup)

    async def connect(self, on_status: Callable[[WorkerStatus], None], on_lost: Callable[[], None]) -> ControlLink:
        return await ControlLink.open(self.socket, on_status, on_lost)

    def on_gone(self, call: Callable[[LocalWorker], None]) -> None:
        self._exit.add_done_callback(lambda _: call(self))

    async def exit_status(self) -> int | None:
        """As the nursery reports it, which is the parent; None when it does not."""
        if self._ending is not None:
            done, _ = await asyncio.wait({self._ending}, timeout=_STATUS_LIMIT_S)
            if done and (ending := self._ending.result()) is not None:
                self._peak_bytes = ending.peak_bytes
                return ending.status
        return await super().exit_status()

    def describe_exit(self, status: int | None) -> Exit:
        """The exit with the worker's own report and the last line of its log; its files are removed."""
        span = LogSpan(self.log_path, self._log_start, file_size(self.log_path))
        report = self._paths.read_exit_report()
        if report is None and not self._was_killed:
            cause = self._kills.explain(self._cgroup, status, self._peak_bytes, "worker")
            report = ExitReport(Code.KILLED_FOR_MEMORY, cause, permanent=False) if cause else None
        exit = Exit(status, report, last_warning(self.log_path), span)
        self._paths.remove()
        return exit


class LocalLauncher:
    """`Launcher` for this host. A lock file ensures one per run directory."""

    def __init__(self, options: LocalOptions) -> None:
        self._options = options
        self._run_dir = options.run_dir.absolute()
        self._log_dir = options.log_dir.absolute()
        arguments = ("--entry", options.entry, "--preload", ",".join(options.preload))
        self._kills = MemoryKills()
        self._own_cgroup = CgroupMemory()
        self._kills.watch(self._own_cgroup)
        self.nursery = NurseryLink(arguments, self._run_dir / "nursery.log", self._kill_of_nursery)
        self._workers: set[LocalWorker] = set()
        self._ending: dict[asyncio.Task[None], WorkerHandle] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._joined: dict[str, JoinedPort] = {}
        self._lock: int | None = None
        self._regular: tuple[asyncio.Task[None], ...] = ()

    async def start(self) -> None:
        """Lock the run directory and start the nursery; a second call changes nothing."""
        if self._lock is not None:
            return
        if not socket_fits(self._run_dir):
            raise InvalidConfig(f"run_dir: {self._run_dir} is too long for the path of a unix socket")
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            make_private(self._run_dir)
            self._lock = lock_file(self._run_dir / LOCK_FILE)
        except OSError as error:
            raise InvalidConfig(f"run_dir, log_dir: cannot write {error.filename}: {error.strerror}") from error
        if self._lock is None:
            raise InvalidConfig(f"run_dir: another daemon uses {self._run_dir}")
        keep_room(self._run_dir)
        rotation = rotate_regularly(
            lambda: [worker.log_path for worker in self._workers],
            self._options.log_max_bytes,
            self._options.log_keep,
        )
        self._regular = (
            asyncio.create_task(rotation, name="log rotation"),
            asyncio.create_task(self._kills.keep_looking(), name="kills for memory"),
        )
        self.nursery.kill_leftover()
        try:
            self.nursery.start()
        except LaunchFailed as error:
            log.error("nursery not started; the next launch tries again", extra={"reason": str(error)})

    def _kill_of_nursery(self) -> str:
        """Why the kernel killed the nursery, which is in the cgroup of this process; empty if it did not."""
        cause = self._kills.explain(self._own_cgroup, None, 0, "fork server")
        return f"was {cause}" if cause else ""

    async def launch(self, spec: WorkerSpec) -> LocalWorker:
        """Wait for the nursery, which may take seconds, then fork the worker, which takes milliseconds."""
        keep_room(self._run_dir)
        await self.nursery.ready()
        launching = asyncio.ensure_future(self._launch(spec))
        try:
            return await asyncio.shield(launching)
        except asyncio.CancelledError:
            if not (await asyncio.wait({launching}, timeout=CANCEL_LIMIT_S))[0]:
                launching.cancel()  # kills the nursery
            with suppress(LaunchFailed, asyncio.CancelledError):
                await (await launching).stop(0)
            raise

    async def join_port(self, name: str, host: str, port: int) -> JoinedPort:
        """Listen on an instance's port in this process, as one more of its workers here: with the socket of these, or a
        new one that later workers share, until `leave_port`. The caller decides when it accepts connections.

        Raises:
            PortConflict, InvalidConfig: the port cannot be bound.
            LaunchFailed: no descriptors are left.
        """
        async with self._turns.setdefault(name, asyncio.Lock()):
            with ExitStack() as held:
                try:
                    ports = await self._shared_ports(name)
                    for sock in ports.values():
                        held.enter_context(sock)
                    listener = ports.get(port) or held.enter_context(bind(host, port))
                    listen_at(listener, port)
                    ends = {end: ports[end].dup() for end in (RECEIVE_END, SEND_END) if end in ports}
                    joined = JoinedPort(listener.dup(), ConnectionQueue(ends))
                except OSError as error:
                    raise LaunchFailed(f"cannot listen on port {port}: {error}") from error
            self.leave_port(name)  # from an earlier daemon
            self._joined[name] = joined
            return joined

    def inherit_port(self, name: str, listener: socket.socket) -> None:
        """Have `join_port` and the instance's workers share this socket, on which a daemon before this one listened."""
        self._joined[name] = JoinedPort(listener, ConnectionQueue({}))

    def joined_ports(self) -> dict[str, socket.socket]:
        """The listening sockets of joined ports, by instance."""
        return {name: each.listener for name, each in self._joined.items()}

    def leave_port(self, name: str) -> None:
        """Close what `join_port` has opened; workers that share it go on."""
        if (joined := self._joined.pop(name, None)) is not None:
            joined.listener.close()
            joined.queue.close()

    async def _launch(self, spec: WorkerSpec) -> LocalWorker:
        async with self._turns.setdefault(spec.name, asyncio.Lock()):  # the first replica binds the ports
            ports = await self._shared_ports(spec.name)
            with ExitStack() as held:
                for sock in ports.values():
                    held.enter_context(sock)
                descriptors = {number: sock.fileno() for number, sock in ports.items()}
                try:
                    return await self._fork(spec, descriptors)
                except NurseryDied:  # retry with a new incarnation, since the old fork may exist
                    return await self._fork(spec, descriptors)

    async def _shared_ports(self, name: str) -> dict[int, socket.socket]:
        for worker in tuple(self._workers):
            if worker.spec.name == name and (ports := await borrow_ports(worker.socket)):
                return ports
        return self._joined[name].copies() if name in self._joined else {}

    async def _fork(self, spec: WorkerSpec, ports: Mapping[int, int]) -> LocalWorker:
        """Bind the control socket, and the one for other hosts, then fork in the nursery, which gets the descriptors of
        both, of the log and of `ports`. The worker's spec has the port of its `link_address`.
        """
        paths = WorkerPaths(self._run_dir, new_incarnation())
        log_path = self.log_path(spec.name)
        try:
            log_fd = open_log(log_path, self._options.log_max_bytes, self._options.log_keep)
            with ExitStack() as held:
                held.callback(os.close, log_fd)
                log_start = os.fstat(log_fd).st_size
                listener = held.enter_context(_listen(paths.socket))
                if spec.link_address:
                    links = held.enter_context(_listen_for_other_hosts(spec.link_address))
                    ports = {**ports, LINK_LISTENER: links.fileno()}
                    spec = replace(spec, link_address=address_of(links))
                request = {"incarnation": paths.incarnation, "run_dir": str(self._run_dir), "spec": spec.to_json()}
                forked = await self.nursery.fork(request, listener.fileno(), log_fd, ports)
        except (OSError, TeimgrError) as error:
            paths.remove()
            raise LaunchFailed(str(error)) from error
        except (LaunchFailed, asyncio.CancelledError):  # the nursery may have forked and written the run file
            with suppress(OSError):  # without descriptors, a worker may exist: keep its files
                if unanswered := self._find(paths):
                    await unanswered.stop(0)
                else:
                    paths.remove()
            raise
        return self._keep(
            LocalWorker(
                *(spec, paths, forked.pid, forked.pidfd, time.time(), log_path, forked.ending, self._kills, log_start)
            )
        )

    async def find(self) -> FoundWorkers:
        """As the protocol; workers without a run file, which nothing supervises, are killed."""
        try:
            found = {paths: self._find(paths) for paths in all_worker_paths(self._run_dir)}
        except OSError as error:
            raise Unavailable(f"cannot look for the workers of an earlier daemon: {error}") from error
        dead = [paths for paths, worker in found.items() if not worker]
        ended = [each for paths in dead if (each := self._ended(paths))]
        for paths in dead:
            paths.remove()
        alive = [worker for worker in found.values() if worker]
        recorded = {worker.incarnation for worker in alive}
        for process in await asyncio.to_thread(unrecorded_workers, self._run_dir, recorded):
            if (pidfd := open_pidfd(process)) is not None:
                log.error("killing a worker without a run file", extra={"pid": process.pid})
                with suppress(LaunchFailed):
                    await ProcessHandle(process.pid, pidfd).stop(0)
        return FoundWorkers(alive, ended)

    async def adopt(self, workers: Sequence[WorkerHandle], accepts: Callable[[WorkerSpec], bool]) -> list[Adopted]:
        wanted = [worker for worker in workers if accepts(worker.spec)]
        statuses = await asyncio.gather(*map(_identify, wanted))
        adopted = _best_of_each(
            Adopted(worker, status) for worker, status in zip(wanted, statuses, strict=True) if status
        )
        kept = {each.handle for each in adopted}
        unresponsive = {worker for worker, status in zip(wanted, statuses, strict=True) if status is None}
        succeeded = {worker.spec.name for worker in kept}
        leftovers = [worker for worker in workers if worker not in kept]
        await asyncio.gather(
            *(
                self._end(each, 0.0 if each in unresponsive else LEFTOVER_GRACE_S, each.spec.name in succeeded)
                for each in leftovers
            )
        )
        return adopted

    async def _end(self, worker: WorkerHandle, grace_s: float, has_successor: bool) -> None:
        """End a worker of an earlier daemon; return when it is gone, or has left its ports to a successor.

        Such a worker may serve: one that was joining when its daemon died accepts connections once it is loaded. Ended
        by SIGTERM it would close kept connections in the moment of a request.
        """
        log.info("ending a worker of an earlier daemon", extra={"instance": worker.spec.name, "pid": worker.pid})
        if has_successor and grace_s and await _hand_over(worker, grace_s):
            ending = asyncio.create_task(_stop(worker, grace_s, sigterm=False))
            self._ending[ending] = worker
            ending.add_done_callback(self._ending.pop)
        else:
            await _stop(worker, grace_s, sigterm=True)

    async def strays(self, owned: Collection[str]) -> list[Stray]:
        """As the protocol: workers with a handle, except trials and those that are being ended, and those without."""
        kept = {worker.incarnation: worker for worker in self._workers}
        instances = [worker for worker in kept.values() if not worker.spec.name.startswith("_")]  # "_": a trial
        found = [
            Stray(worker.incarnation, worker.spec.name, worker.pid, partial(worker.stop, 0))
            for worker in instances
            if worker.incarnation not in owned and not self.is_ending(worker)
        ]
        pids = {worker.pid for worker in self._workers}
        return found + without_handle(self._run_dir, kept, pids, (self.nursery.pid, self.nursery.standby_pid))

    def is_ending(self, worker: WorkerHandle) -> bool:
        """True if it is one of an earlier daemon that finishes its calls."""
        return worker in self._ending.values()

    def log_path(self, name: str) -> Path:
        return self._log_dir / f"{name}.log"

    async def close(self) -> None:
        """Release the workers, end the nursery and the log rotation, unlock the run directory."""
        if not self._regular:  # not started: the run directory may be another daemon's
            return
        await asyncio.gather(*self._ending)
        for worker in tuple(self._workers):
            await worker.release()
        self._workers.clear()
        await self.nursery.close()
        for task in self._regular:
            task.cancel()
        await asyncio.gather(*self._regular, return_exceptions=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _find(self, paths: WorkerPaths) -> LocalWorker | None:
        """The live worker of a run file; an unreadable spec becomes one that nothing accepts. Raises OSError."""
        found = WorkerRunFile.read(paths.run_file)
        pidfd = found.open_pidfd() if found else None
        if found is None or pidfd is None:
            return None
        spec = found.worker_spec() or WorkerSpec(name=found.instance, model_id="")
        log_path = self.log_path(found.instance)
        return self._keep(
            LocalWorker(spec, paths, found.pid, pidfd, found.process.started_at, log_path, None, self._kills)
        )

    def _ended(self, paths: WorkerPaths) -> EndedWorker | None:
        """How the worker of a run file ended; None when it has none, as after an orderly end, or the host did."""
        found = WorkerRunFile.read(paths.run_file)
        if found is None or found.boot_id != boot_id():
            return None
        log_path = self.log_path(found.instance)
        exit = Exit(None, paths.read_exit_report(), last_warning(log_path), LogSpan(log_path, 0, file_size(log_path)))
        return EndedWorker(found.instance, found.worker_spec(), found.pid, found.process.started_at, exit)

    def _keep(self, worker: LocalWorker) -> LocalWorker:
        self._workers.add(worker)
        worker.on_gone(self._workers.discard)
        return worker


def _best_of_each(found: Iterable[Adopted]) -> list[Adopted]:
    """One worker for each replica: a daemon that died in a rolling restart leaves two with the same spec.

    A ready one is preferred, as muxes send calls to it; of two, the older: the younger was not published yet.
    """
    best: dict[tuple[str, int], Adopted] = {}
    for each in sorted(found, key=lambda each: (each.status.state != "ready", each.handle.started_at)):
        best.setdefault((each.handle.spec.name, each.handle.spec.replica), each)
    return list(best.values())


async def _identify(worker: WorkerHandle) -> WorkerStatus | None:
    """The status that the worker answers; None unless it identifies as the process that was found."""
    status = await first_status(worker.connect, IDENTITY_LIMIT_S)
    expected = (worker.incarnation, worker.spec.hash)
    return status if status is not None and (status.incarnation, status.spec_hash) == expected else None


async def _hand_over(worker: WorkerHandle, grace_s: float) -> bool:
    """Have the worker leave its ports to others of its instance and end; False if it does not confirm it."""
    try:
        link = await worker.connect(lambda status: None, lambda: None)
        try:
            await link.drain(grace_s, handover=True, timeout_s=IDENTITY_LIMIT_S)
        finally:
            link.close()
    except TeimgrError:
        return False
    return True


async def _stop(worker: WorkerHandle, grace_s: float, *, sigterm: bool) -> None:
    try:
        await worker.stop(grace_s, sigterm=sigterm)
    except LaunchFailed as error:
        log.error("worker of an earlier daemon does not exit after SIGKILL", extra={"reason": str(error)})


def _listen_for_other_hosts(address: str) -> socket.socket:
    """A listening socket at a free port of a numeric address. Raises InvalidConfig: it is not one of this host's."""
    listener = bind(address, 0, "link_address")
    listener.listen(_BACKLOG)
    return listener


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
