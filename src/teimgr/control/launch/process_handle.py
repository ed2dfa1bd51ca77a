"""Processes that outlive the daemon: their identity, run directory, run files and handles. For workers and muxes.

Pids are reused, so a process is identified by pid and start time within one boot (`ProcessId`, `RunFile`) and held by
a pidfd, which never refers to another process (`ProcessHandle`).
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import secrets
import signal
import stat
import subprocess
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from teimgr.errors import Code, InvalidConfig
from teimgr.files import write_atomically
from teimgr.http.unix_listener import SOCKET_PATH_BYTES
from teimgr.observability.logs import LogLines, LogSpan
from teimgr.spec import WorkerSpec, known, worker_file

LOCK_FILE = "daemon.lock"
"""File in a run directory, locked by the daemon that uses it."""
_ROOM_BYTES = 1 << 16
KILL_LIMIT_S = 10.0
"""Time for a process to exit after SIGKILL before it counts as stuck."""

LOADED_PART = 0.25
"""A process without an answer is working if it ran or waited for a processor for at least this fraction of the time."""

# Fields of /proc/<pid>/stat after the parenthesised name, counted from 0 (proc_pid_stat(5) counts from 1, name is 2).
_STATE, _START_TIME = 0, 19
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class LaunchFailed(Exception):
    """A process could not be started or ended; the text is the reason. A later attempt may succeed."""


@dataclass(frozen=True, slots=True)
class ExitReport:
    """A worker's own reason for its exit. `code` is a number of `errors.Code`.

    `permanent`: another worker with the same spec would fail too.
    """

    code: int
    message: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended.

    `status` is the exit status, negative for a signal, None if unknown (an adopted process is not our child).
    `log_tail` is the last line of the worker's log if it may explain the exit, `log` the log since the worker's start.
    """

    status: int | None
    report: ExitReport | None = None
    log_tail: str = ""
    log: LogSpan | LogLines | None = None


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A pid with the start time of its process, in clock ticks since boot: unique within one boot."""

    pid: int
    start_time: int

    @property
    def started_at(self) -> float:
        """Seconds since the epoch."""
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + self.start_time / _TICKS_PER_S


def look_up(pid: int) -> ProcessId | None:
    """The process that has this pid now; None if it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name may contain spaces and parentheses
    return None if fields[_STATE] in "ZX" else ProcessId(pid, int(fields[_START_TIME]))


def children_of(*pids: int | None) -> list[ProcessId]:
    """The live children of processes; those that are gone have no children."""
    found: list[ProcessId] = []
    for pid in filter(None, pids):
        with suppress(OSError):  # the process has exited, or the kernel does not list children
            numbers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            found += [process for number in numbers if (process := look_up(int(number)))]
    return found


def open_pidfd(process: ProcessId) -> int | None:
    """A descriptor that becomes readable when `process` ends; None when it has ended, even if its pid was reused."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # The pidfd holds the process; if the start time still matches, it is the right one.
    with ExitStack() as held:
        held.callback(os.close, pidfd)
        if look_up(process.pid) == process:
            held.pop_all()
            return pidfd
    return None


@cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def keep_room(run_dir: Path) -> None:
    """Have the lock file of a run directory take the room of some run files: a worker is started by one, and a crash
    on a full disk would end its instance.
    """
    lock = run_dir / LOCK_FILE
    with suppress(OSError):
        if lock.stat().st_size < _ROOM_BYTES:
            lock.write_bytes(os.urandom(_ROOM_BYTES))  # zeros would reserve nothing on a compressing file system


@dataclass(frozen=True, slots=True)
class RunFile:
    """A JSON file from which the next daemon adopts a process; subclasses add the parameters of its start."""

    pid: int
    start_time: int
    boot_id: str

    @classmethod
    def of(cls, pid: int, **facts: str) -> Self | None:
        """The run file of a live process; None when it has ended already."""
        process = look_up(pid)
        return cls(pid=pid, start_time=process.start_time, boot_id=boot_id(), **facts) if process else None

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The inverse of `write`; None when the file is missing or does not identify a process.

        Raises:
            OSError: The file is there and cannot be read, as where this process has no descriptor left.
        """
        try:
            found = cls(**known(cls, json.loads(path.read_text())))
            return found if isinstance(found.pid, int) and isinstance(found.start_time, int) else None
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Write it, on a full disk in the room that the lock file beside it has kept."""
        content = json.dumps(asdict(self)).encode()
        try:
            write_atomically(path, content)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with suppress(OSError):
                os.truncate(path.with_name(LOCK_FILE), 0)
            write_atomically(path, content)

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.start_time)

    def open_pidfd(self) -> int | None:
        """A pidfd of the process if it is still alive: the check before an adoption."""
        return open_pidfd(self.process) if self.boot_id == boot_id() else None


class ProcessHandle:
    """Waits for one process and stops it. The pidfd is closed by `release`, or when the process has exited.

    The process leads its own process group, which ends with it.
    """

    def __init__(self, pid: int, pidfd: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._child = child
        self._ended = asyncio.Event()
        self._was_killed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._ended.set)
        self._exit = asyncio.create_task(self._watch(), name=f"exit of process {pid}")

    @classmethod
    def spawn(cls, command: Sequence[str], output: int, environ: Mapping[str, str]) -> ProcessHandle:
        """Start `command` with a descriptor for its output. Raises OSError."""
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ, start_new_session=True
        )
        return cls(child.pid, os.pidfd_open(child.pid), child)  # a child's pid is not reused before it is reaped

    @classmethod
    def adopt(cls, run_file: RunFile) -> ProcessHandle | None:
        """The process of a run file that an earlier daemon left; None when it has ended."""
        pidfd = run_file.open_pidfd()
        return None if pidfd is None else cls(run_file.pid, pidfd)

    @property
    def has_ended(self) -> bool:
        """True if the process is gone, or was released."""
        return self._ended.is_set()

    async def wait(self) -> Exit:
        """Return when the process is gone. Any number may wait."""
        return await asyncio.shield(self._exit)

    async def stop(self, grace_s: float, *, sigterm: bool = True) -> Exit:
        """Send SIGTERM, wait `grace_s`, kill the process group, wait `KILL_LIMIT_S`.

        Without `sigterm`, or without grace, it is skipped. A later call with less grace cuts an earlier one short.

        Raises:
            LaunchFailed: the process is still there after all that.
        """
        if sigterm and grace_s > 0:
            self.send_signal(signal.SIGTERM)
        if not await self._gone_within(grace_s):
            self._kill_group()
            if not await self._gone_within(KILL_LIMIT_S):
                raise LaunchFailed(f"process {self.pid} is still there {KILL_LIMIT_S:g} s after SIGKILL")
        return await self.wait()

    def send_signal(self, number: signal.Signals) -> None:
        if not self._ended.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def activity_s(self) -> float | None:
        """Processor time that its threads had or waited for, in seconds; None if the kernel does not count it."""
        if self._ended.is_set():
            return None
        try:
            counts = [file.read_text().split() for file in Path(f"/proc/{self.pid}/task").glob("*/schedstat")]
            return sum(int(ran) + int(waited) for ran, waited, _ in counts) / 1e9 if counts else None
        except (OSError, ValueError):  # a thread has just ended
            return None

    async def release(self) -> None:
        """Close the pidfd and forget the process, which goes on."""
        self._exit.cancel()
        await asyncio.wait({self._exit})

    async def exit_status(self) -> int | None:
        """The exit status of a process that has ended, None if it is not our child."""
        return self._child.poll() if self._child is not None else reap(self.pid)

    def describe_exit(self, status: int | None) -> Exit:
        return Exit(status)

    async def _watch(self) -> Exit:
        try:
            await self._ended.wait()
        finally:
            self._ended.set()  # also after `release`, when the pidfd must not be used
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        return self.describe_exit(await self.exit_status())

    async def _gone_within(self, limit_s: float) -> bool:
        done, _ = await asyncio.wait({self._exit}, timeout=limit_s)
        return bool(done)

    def _kill_group(self) -> None:
        if not self._ended.is_set():
            self._was_killed = True
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.send_signal(signal.SIGKILL)  # it may not lead its group yet


def reap(pid: int) -> int | None:
    """The exit status of a process that we did not start, where it is our child: orphans come to the first process of a
    container, and to one that has declared itself their reaper."""
    try:
        reaped, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if reaped else None


_WORKER_FILE = re.compile(r"([0-9a-f]{12})\.(sock|json|exit|json\.tmp)")
_OTHER_FILE = re.compile(
    r"mux-.*|nursery\.(log.*|run)|standby\.run|daemon\.lock|cores|references|spaces|agent\.sock|bridge\.log.*|ray"
    r"|ray\.(log.*|run)"
)


def new_incarnation() -> str:
    return secrets.token_hex(6)


@dataclass(frozen=True, slots=True)
class WorkerRunFile(RunFile):
    """The run file of a worker. `spec` is text, since one of another version may not parse."""

    socket: str
    incarnation: str
    instance: str
    spec_hash: str
    spec: str

    def worker_spec(self) -> WorkerSpec | None:
        """The spec, None when this version does not understand it."""
        try:
            return WorkerSpec.from_json(self.spec)
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class WorkerPaths:
    """The files of one worker in the run directory: control socket, run file, and an optional exit report.

    The nursery writes the run file right after the fork, so it exists even if the daemon dies then.
    """

    folder: Path
    incarnation: str

    @property
    def socket(self) -> Path:
        return worker_file(self.folder, self.incarnation, "sock")

    @property
    def run_file(self) -> Path:
        return worker_file(self.folder, self.incarnation, "json")

    @property
    def exit_report(self) -> Path:
        return worker_file(self.folder, self.incarnation, "exit")

    def read_exit_report(self) -> ExitReport | None:
        """The exit report, None when the worker left none that can be read."""
        try:
            report = json.loads(self.exit_report.read_text())
            code = int(report["code"] or Code.INTERNAL_ERROR)
            return ExitReport(code, str(report["reason"] or "no reason given"), bool(report["permanent"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def remove(self) -> None:
        for path in (self.socket, self.run_file, self.exit_report, self.run_file.with_suffix(".json.tmp")):
            path.unlink(missing_ok=True)


def all_worker_paths(folder: Path) -> list[WorkerPaths]:
    found = {match[1] for entry in os.scandir(folder) if (match := _WORKER_FILE.fullmatch(entry.name))}
    return [WorkerPaths(folder, incarnation) for incarnation in sorted(found)]


def unrecorded_workers(folder: Path, recorded: Collection[str]) -> list[ProcessId]:
    """Processes of this user that hold a worker's control socket in `folder`, except those of `recorded` incarnations.

    Blocking. A socket keeps its path when the file is removed.
    """
    inodes = set()
    for line in Path("/proc/net/unix").read_text().splitlines():
        *_, inode, name = line.rsplit(maxsplit=2)
        match = _WORKER_FILE.fullmatch(Path(name).name)
        if match and Path(name).parent == folder and match[1] not in recorded:
            inodes.add(f"socket:[{inode}]")
    return [process for process in _processes() if _has_descriptor(process, inodes)] if inodes else []


def _processes() -> Iterator[ProcessId]:
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and (process := look_up(int(entry.name))):
            yield process


def _has_descriptor(process: ProcessId, targets: Collection[str]) -> bool:
    try:
        return any(str(entry.readlink()) in targets for entry in Path(f"/proc/{process.pid}/fd").iterdir())
    except OSError:  # the process has exited or is another user's
        return False


def socket_fits(folder: Path) -> bool:
    return len(os.fsencode(WorkerPaths(folder, new_incarnation()).socket)) <= SOCKET_PATH_BYTES


def make_private(folder: Path) -> None:
    """Create `folder` with mode 0700, or restrict an existing one to it; one that others may use is left untouched.

    Raises:
        InvalidConfig: it cannot be made, is another user's or a shared one, or holds files that are not ours.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid():
            raise InvalidConfig(f"run_dir: {folder} belongs to another user")
        if found.st_mode & stat.S_ISVTX:
            raise InvalidConfig(f"run_dir: {folder} is a shared folder; use a folder inside it")
        if found.st_mode & 0o777 == 0o700:
            return
        if foreign := sorted(_unknown_files(folder)):
            raise InvalidConfig(f"run_dir: {folder} contains other files, such as {foreign[0]}; use an empty folder")
        folder.chmod(0o700)
    except OSError as error:
        raise InvalidConfig(f"run_dir: {folder} cannot be used: {error.strerror or error}") from error


def _unknown_files(folder: Path) -> Iterator[str]:
    for entry in os.scandir(folder):
        known = _WORKER_FILE.fullmatch(entry.name) or _OTHER_FILE.fullmatch(entry.name)
        if not known or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
            yield entry.name


class MeteredProcess(Protocol):
    """A worker or mux on this host or another."""

    def activity_s(self) -> Awaitable[float | None]:
        """Like `WorkerHandle.activity_s`."""


class WorkMeter:
    """Within its block, `has_worked` is True if `process` worked since the last call or the start of the block.

    Reading a process of another host takes a round trip, for which only `has_worked` waits.
    """

    def __init__(self, process: MeteredProcess | None) -> None:
        self._process = process
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self._last = asyncio.ensure_future(self._reading())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._last.cancel()
        await asyncio.wait({self._last})

    async def has_worked(self) -> bool:
        """False also where one of the two readings is not to be had."""
        before_at, before_s = await self._last
        self._last = asyncio.ensure_future(self._reading())
        now_at, now_s = await self._last
        if before_s is None or now_s is None:
            return False
        return now_s - before_s >= (now_at - before_at) * LOADED_PART

    async def _reading(self) -> tuple[float, float | None]:
        at = self._clock()
        return at, None if self._process is None else await self._process.activity_s()
