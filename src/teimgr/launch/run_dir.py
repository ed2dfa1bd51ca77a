"""The run directory of the workers: up to three files for each.

    <incarnation>.sock   the worker's control socket
    <incarnation>.json   its run file: which process it is, and the spec it was started with
    <incarnation>.exit   its exit report, if it wrote one

The nursery writes the run file right after the fork, so it exists even if the daemon dies at that moment.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from teimgr.errors import Code, InvalidConfig
from teimgr.launch.launcher import ExitReport
from teimgr.launch.process_handle import RunFile
from teimgr.spec import WorkerSpec

# The kernel's limit on a unix socket's path is 108 bytes with the final zero.
_SOCKET_PATH_BYTES = 107
_WORKER_FILE = re.compile(r"([0-9a-f]{12})\.(sock|json|exit|json\.tmp)")
_OTHER_FILE = re.compile(r"mux-.*|nursery\.log.*|daemon\.lock")


def new_incarnation() -> str:
    """A unique name for one worker process."""
    return secrets.token_hex(6)


@dataclass(frozen=True, slots=True)
class WorkerRunFile(RunFile):
    """The run file of a worker. `spec` is kept as text: one of another version of teimgr may not parse."""

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
    """The files of one worker in the run directory."""

    folder: Path
    incarnation: str

    @property
    def socket(self) -> Path:
        return self.folder / f"{self.incarnation}.sock"

    @property
    def run_file(self) -> Path:
        return self.folder / f"{self.incarnation}.json"

    @property
    def exit_report(self) -> Path:
        return self.folder / f"{self.incarnation}.exit"

    def read_exit_report(self) -> ExitReport | None:
        """The exit report, None when the worker left none that can be read."""
        try:
            report = json.loads(self.exit_report.read_text())
            code = int(report["code"] or Code.INTERNAL_ERROR)
            return ExitReport(code, str(report["reason"] or "no reason given"), bool(report["permanent"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def remove(self) -> None:
        """Delete all files of the worker."""
        for path in (self.socket, self.run_file, self.exit_report, self.run_file.with_suffix(".json.tmp")):
            path.unlink(missing_ok=True)


def all_worker_paths(folder: Path) -> list[WorkerPaths]:
    """Every worker that has a file in `folder`, in the order of their names."""
    found = {match[1] for entry in os.scandir(folder) if (match := _WORKER_FILE.fullmatch(entry.name))}
    return [WorkerPaths(folder, incarnation) for incarnation in sorted(found)]


def socket_fits(folder: Path) -> bool:
    """Whether the path of a worker's socket in `folder` is short enough for the kernel."""
    return len(os.fsencode(WorkerPaths(folder, new_incarnation()).socket)) <= _SOCKET_PATH_BYTES


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
            raise InvalidConfig(f"run_dir: {folder} is a shared folder; name one inside it")
        if found.st_mode & 0o777 == 0o700:
            return
        if strangers := sorted(_unknown_files(folder)):
            raise InvalidConfig(f"run_dir: {folder} holds other things, such as {strangers[0]}; name an empty folder")
        folder.chmod(0o700)
    except OSError as error:
        raise InvalidConfig(f"run_dir: {folder} cannot be used: {error.strerror or error}") from error


def _unknown_files(folder: Path) -> Iterator[str]:
    for entry in os.scandir(folder):
        known = _WORKER_FILE.fullmatch(entry.name) or _OTHER_FILE.fullmatch(entry.name)
        if not known or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
            yield entry.name
