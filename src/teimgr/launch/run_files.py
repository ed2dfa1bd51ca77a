"""The run directory: one run file, one socket and perhaps last words per worker.

    <incarnation>.sock   where the worker answers
    <incarnation>.json   the run file: which process it is, for which spec
    <incarnation>.exit   its last words, when it had any

The run file is written by the nursery right after the fork: so it is present however suddenly the daemon that asked
for the worker dies.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from teimgr.errors import Code, InvalidConfig
from teimgr.files import write_atomically
from teimgr.launch.launcher import ExitReport
from teimgr.spec import WorkerSpec

# Fields of /proc/<pid>/stat after the parenthesised name, counted from 0 (proc_pid_stat(5) counts from 1, name is 2).
_STATE, _START_TIME = 0, 19
# The kernel's limit on a unix socket's path is 108 bytes with the final zero.
_SOCKET_PATH_BYTES = 107
_OURS = re.compile(r"([0-9a-f]{12})\.(sock|json|exit|json\.tmp)")
_OTHERS_OF_US = re.compile(r"mux-.*|nursery\.log.*|daemon\.lock")


def new_incarnation() -> str:
    """A name for one process, never used twice."""
    return secrets.token_hex(6)


@dataclass(frozen=True, slots=True)
class RunFile:
    """Which process a worker is. `spec` is kept as text: that of another version may not parse."""

    pid: int
    start_time: int
    boot_id: str
    socket: str
    incarnation: str
    instance: str
    spec_hash: str
    spec: str

    @property
    def process(self) -> ProcessId | None:
        """The process, when it was of this boot."""
        return ProcessId(self.pid, self.start_time) if self.boot_id == boot_id() else None

    def write(self, path: Path) -> None:
        """Write it, whole or not at all."""
        write_atomically(path, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, path: Path) -> RunFile | None:
        """The inverse of `write`; None when the file does not say which process it means."""
        try:
            found = cls(**json.loads(path.read_text()))
            return found if isinstance(found.pid, int) and isinstance(found.start_time, int) else None
        except (OSError, ValueError, TypeError):
            return None

    def worker_spec(self) -> WorkerSpec | None:
        """The spec, when this version understands it."""
        try:
            return WorkerSpec.from_json(self.spec)
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class WorkerPaths:
    """The files of one worker in the run directory."""

    folder: Path
    incarnation: str

    @property
    def socket(self) -> Path:
        """Where the worker answers."""
        return self.folder / f"{self.incarnation}.sock"

    @property
    def run_file(self) -> Path:
        """The run file."""
        return self.folder / f"{self.incarnation}.json"

    @property
    def last_words(self) -> Path:
        """What a worker that failed for a reason it knows leaves behind."""
        return self.folder / f"{self.incarnation}.exit"

    def read_last_words(self) -> ExitReport | None:
        """The last words, when the worker left any that can be understood."""
        try:
            said = json.loads(self.last_words.read_text())
            code = int(said["code"] or Code.INTERNAL_ERROR)
            return ExitReport(code, str(said["reason"] or "no reason given"), bool(said["permanent"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def remove(self) -> None:
        """Remove all of them."""
        for path in (self.socket, self.run_file, self.last_words, self.run_file.with_suffix(".json.tmp")):
            path.unlink(missing_ok=True)


def all_worker_paths(folder: Path) -> Iterator[WorkerPaths]:
    """Every worker that has left a file in `folder`; files of other parts of teimgr are not touched."""
    found = {match[1] for entry in os.scandir(folder) if (match := _OURS.fullmatch(entry.name))}
    return (WorkerPaths(folder, incarnation) for incarnation in sorted(found))


def socket_fits(folder: Path) -> bool:
    """Whether a worker's socket in `folder` has a path that the kernel takes."""
    return len(os.fsencode(WorkerPaths(folder, new_incarnation()).socket)) <= _SOCKET_PATH_BYTES


def make_private(folder: Path) -> None:
    """Make `folder`, or take it as it is, for this user alone. One that others may be using is left untouched.

    Raises:
        InvalidConfig: it cannot be made, is another user's or a shared one, or holds what is not ours.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid():
            raise InvalidConfig(f"run_dir: {folder} belongs to another user")
        if found.st_mode & stat.S_ISVTX:
            raise InvalidConfig(f"run_dir: {folder} is a shared folder; name one inside it")
        if found.st_mode & 0o777 == 0o700:
            return
        if strangers := sorted(_strangers(folder)):
            raise InvalidConfig(f"run_dir: {folder} holds other things, such as {strangers[0]}; name an empty folder")
        folder.chmod(0o700)
    except OSError as error:
        raise InvalidConfig(f"run_dir: {folder} cannot be used: {error.strerror or error}") from error


def _strangers(folder: Path) -> Iterator[str]:
    for entry in os.scandir(folder):
        known = _OURS.fullmatch(entry.name) or _OTHERS_OF_US.fullmatch(entry.name)
        if not known or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
            yield entry.name


_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process for good: its number may be given away again, the pair with `start_time` is not.

    `start_time` is clock ticks since the boot named by `boot_id()`.
    """

    pid: int
    start_time: int

    @property
    def started_at(self) -> float:
        """Seconds since the epoch."""
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + self.start_time / _TICKS_PER_S


def look_up(pid: int) -> ProcessId | None:
    """The process that has this number now; None when there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name may hold spaces and parentheses of its own
    return None if fields[_STATE] in "ZX" else ProcessId(pid, int(fields[_START_TIME]))


def open_pidfd(process: ProcessId) -> int | None:
    """A descriptor that becomes readable when `process` ends; None when it has ended, whoever has its number now."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # From here on the number cannot be reused unseen: the same start time means the same process.
    if look_up(process.pid) == process:
        return pidfd
    os.close(pidfd)
    return None


@cache
def boot_id() -> str:
    """Changes with every boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def thread_count() -> int:
    """Threads of this process, those of native libraries included."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208  names are enough
