"""Workers as processes of this host: forked from the nursery, found again after a crash of the daemon."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from teimgr.errors import InvalidConfig
from teimgr.launch import nursery
from teimgr.launch.control_link import WorkerStatus, identify
from teimgr.launch.launcher import Adopted, LaunchFailed
from teimgr.launch.log_files import open_log, shrink
from teimgr.launch.nursery import PORTS_LIMIT
from teimgr.launch.nursery_link import NurseryDied, NurseryLink
from teimgr.launch.process_handle import LocalWorker
from teimgr.launch.run_files import (
    RunFile,
    WorkerPaths,
    all_worker_paths,
    make_private,
    new_incarnation,
    open_pidfd,
    socket_fits,
)
from teimgr.spec import WorkerSpec
from teimgr.wire.frames import HEADER, FrameType, Method, pack_header, unpack_header

_ANSWER_LIMIT_S = 2.0
_ANSWER_BYTES = 4096


async def borrow(path: Path) -> dict[int, socket.socket]:
    """The sockets that the worker at `path` gives, by port; none when it has none, is ending, or does not answer.

    The caller closes them.
    """
    try:
        async with asyncio.timeout(_ANSWER_LIMIT_S):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                link.setblocking(False)
                return await _ask(link, path)
    except OSError:  # TimeoutError is one of them
        return {}


async def _ask(link: socket.socket, path: Path) -> dict[int, socket.socket]:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(link, str(path))
    await loop.sock_sendall(link, pack_header(0, FrameType.REQUEST, Method.SHARE_PORTS, 1))
    await _readable(link)
    # Descriptors come with the first byte of the answer, which is small enough to come whole.
    answer, descriptors, _, _ = socket.recv_fds(link, _ANSWER_BYTES, PORTS_LIMIT)
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    if len(answer) < HEADER.size or unpack_header(answer).type != FrameType.REPLY:
        return {}
    return dict(zip(json.loads(answer[HEADER.size :]), sockets, strict=True))


async def _readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(link, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(link)


IDENTITY_LIMIT_S = 5.0
LEFTOVER_GRACE_S = 5.0
LOG_CHECK_INTERVAL_S = 30.0
_BACKLOG = 128

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """Where things lie, how large a log may grow, and what the nursery imports and runs."""

    run_dir: Path
    log_dir: Path
    log_max_bytes: int = 10 << 20
    log_keep: int = 3
    entry: str = nursery.ENTRY
    preload: tuple[str, ...] = nursery.PRELOAD


class LocalLauncher:
    """`Launcher` for this host. One per run directory, which a lock sees to."""

    def __init__(self, options: LocalOptions) -> None:
        self._options = options
        self._run_dir = options.run_dir.absolute()
        self._log_dir = options.log_dir.absolute()
        arguments = ("--entry", options.entry, "--preload", ",".join(options.preload))
        self.nursery = NurseryLink(arguments, self._run_dir / "nursery.log")
        self._handles: set[LocalWorker] = set()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._lock: int | None = None
        self._log_keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take the run directory and start the nursery; a second call changes nothing."""
        if self._lock is not None:
            return
        self._log_dir.mkdir(parents=True, exist_ok=True)
        make_private(self._run_dir)
        if not socket_fits(self._run_dir):
            raise InvalidConfig(f"run_dir: a unix socket in {self._run_dir} would have too long a path")
        self._lock = _take_lock(self._run_dir / "daemon.lock")
        self._log_keeper = asyncio.create_task(self._keep_logs(), name="log keeper")
        try:
            self.nursery.start()
        except LaunchFailed as error:
            log.error("nursery not started; every launch tries again", extra={"reason": str(error)})

    async def launch(self, spec: WorkerSpec) -> LocalWorker:
        """Wait for the nursery, which may take seconds; then make the worker, which takes an instant."""
        await self.nursery.ready()
        making = asyncio.ensure_future(self._make(spec))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await self._unmake(making)
            raise

    async def _make(self, spec: WorkerSpec) -> LocalWorker:
        async with self._turns.setdefault(spec.name, asyncio.Lock()):  # the first binds the ports, the others share
            ports = await self._shared_ports(spec)
            with ExitStack() as held:
                for sock in ports.values():
                    held.enter_context(sock)
                numbers = {number: sock.fileno() for number, sock in ports.items()}
                try:
                    return await self._make_once(spec, numbers)
                except NurseryDied:  # a fresh one may do better; under a new name: nothing of this try may be met again
                    return await self._make_once(spec, numbers)

    async def _shared_ports(self, spec: WorkerSpec) -> dict[int, socket.socket]:
        """The sockets of the instance's ports, if another worker of it has them."""
        for handle in [handle for handle in self._handles if handle.spec.name == spec.name]:
            if ports := await borrow(handle.socket):
                return ports
        return {}

    async def _make_once(self, spec: WorkerSpec, ports: Mapping[int, int]) -> LocalWorker:
        """Bind the socket, fork, hand the sockets over."""
        traces = WorkerPaths(self._run_dir, new_incarnation())
        request = {"incarnation": traces.incarnation, "run_dir": str(self._run_dir), "spec": spec.to_json()}
        log_path = self.log_path(spec.name)
        try:
            log_fd = open_log(log_path, self._options.log_max_bytes, self._options.log_keep)
            with ExitStack() as held:
                held.callback(os.close, log_fd)
                listener = held.enter_context(_listen(traces.socket))
                forked = await self.nursery.fork(request, listener.fileno(), log_fd, ports)
        except OSError as error:
            traces.remove()
            raise LaunchFailed(str(error)) from error
        except LaunchFailed:
            await self._unmake_unanswered(traces)
            raise
        return self._keep(LocalWorker(spec, traces, forked.pid, forked.pidfd, time.time(), log_path, forked.status))

    async def _unmake(self, making: asyncio.Future[LocalWorker]) -> None:
        with suppress(LaunchFailed):
            await (await making).stop(0)

    async def _unmake_unanswered(self, traces: WorkerPaths) -> None:
        """End the worker of a nursery that died before it could answer; its run file says whether there is one."""
        handle = self._find(traces)
        if handle is None:
            traces.remove()
        else:
            await handle.stop(0)

    async def adopt(self, accepts: Callable[[WorkerSpec], bool]) -> list[Adopted]:
        """See who lives, keep whom we want, end the others."""
        alive = []
        for traces, handle in [(traces, self._find(traces)) for traces in all_worker_paths(self._run_dir)]:
            if handle is None:
                traces.remove()
            else:
                alive.append(handle)
        wanted = [handle for handle in alive if accepts(handle.spec)]
        said = await asyncio.gather(*map(_ask_identity, wanted))
        answered = [Adopted(handle, status) for handle, status in zip(wanted, said, strict=True) if status]
        adopted = _best_of_each(answered)
        kept = {each.handle for each in adopted}
        await asyncio.gather(*(_end_leftover(handle) for handle in alive if handle not in kept))
        return adopted

    def log_path(self, name: str) -> Path:
        """`<log_dir>/<name>.log`."""
        return self._log_dir / f"{name}.log"

    async def close(self) -> None:
        """Stop watching, let the nursery end, give the run directory back."""
        for handle in tuple(self._handles):
            await handle.release()
        self._handles.clear()
        await self.nursery.close()
        if self._log_keeper is not None:
            self._log_keeper.cancel()
            await asyncio.wait({self._log_keeper})
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _find(self, traces: WorkerPaths) -> LocalWorker | None:
        """The live worker that `traces` speak of; an unreadable spec gives one that nobody will want."""
        found = RunFile.read(traces.run_file)
        process = found.process if found else None
        pidfd = open_pidfd(process) if process else None
        if found is None or process is None or pidfd is None:
            return None
        spec = found.worker_spec() or WorkerSpec(name=found.instance, model_id="")
        path = self.log_path(found.instance)
        return self._keep(LocalWorker(spec, traces, process.pid, pidfd, process.started_at, path, None))

    def _keep(self, handle: LocalWorker) -> LocalWorker:
        self._handles.add(handle)
        handle.on_gone(self._handles.discard)
        return handle

    async def _keep_logs(self) -> None:
        limit_bytes, keep = self._options.log_max_bytes, self._options.log_keep
        while True:
            await asyncio.sleep(LOG_CHECK_INTERVAL_S)
            for path in {handle.log_path for handle in self._handles}:
                try:
                    await asyncio.to_thread(shrink, path, limit_bytes, keep)
                except OSError as error:
                    log.warning("log not rotated", extra={"path": str(path), "reason": str(error)})


def _best_of_each(found: Iterable[Adopted]) -> list[Adopted]:
    """One worker for each replica. A daemon that died in a rolling restart left two that were told the same.

    Multiplexers send their calls to one that is ready; of two, to the older: the younger was not announced yet.
    """
    best: dict[tuple[str, int], Adopted] = {}
    for each in sorted(found, key=lambda each: (each.status.state != "ready", each.handle.started_at)):
        best.setdefault((each.handle.spec.name, each.handle.spec.replica), each)
    return list(best.values())


async def _ask_identity(handle: LocalWorker) -> WorkerStatus | None:
    """What the process says on its socket, when it says that it is the one of the run file."""
    status = await identify(handle.socket, IDENTITY_LIMIT_S)
    expected = (handle.incarnation, handle.spec.hash)
    return status if status is not None and (status.incarnation, status.spec_hash) == expected else None


async def _end_leftover(handle: LocalWorker) -> None:
    log.info("ending a worker of an earlier daemon", extra={"instance": handle.spec.name, "pid": handle.pid})
    try:
        await handle.stop(LEFTOVER_GRACE_S)
    except LaunchFailed as error:
        log.error("leftover worker does not die", extra={"reason": str(error)})


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


def _take_lock(path: Path) -> int:
    """Hold `path` until this process ends.

    Raises:
        InvalidConfig: another process holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InvalidConfig(f"run_dir: another daemon uses {path.parent}") from None
    return descriptor
