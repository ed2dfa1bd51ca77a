"""Launching and adopting mux processes: the protocols `MuxLauncher` and `MuxHandle`, and the launcher for this host."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from teimgr.config.mux import MuxConfig
from teimgr.config.settings import Settings
from teimgr.control.launch.control_link import MuxLink, MuxLost
from teimgr.control.launch.process_handle import Exit, ProcessHandle, RunFile
from teimgr.errors import InvalidConfig
from teimgr.files import code_id, file_size, write_atomically
from teimgr.http.auth.tls_files import Stamp, TlsFiles
from teimgr.observability.logs import LogSpan, open_log
from teimgr.observability.telemetry import exporting
from teimgr.wire.fleet_tls import FleetIdentity

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "teimgr.mux.process")
BESIDE = "beside"  # also in `mux/process.py`
# By default glibc returns each buffer of several MB to the kernel. With higher thresholds Arrow calls of 10,000 texts
# through a mux are 2.5 to 3.5 times as fast (docs/decisions/0011).
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


class MuxHandle(Protocol):
    """One mux process. `is_current`: its configuration is the one that its launcher would use now.

    `started_at` is in seconds since the epoch.
    """

    pid: int
    started_at: float
    is_current: bool

    async def connect(self, limit_s: float) -> MuxLink:
        """A control link. Raises MuxLost if none is made within the limit."""

    async def wait(self) -> Exit:
        """Return when the process is gone. Any number may wait."""

    async def stop(self, grace_s: float, *, sigterm: bool = True) -> Exit:
        """Like `WorkerHandle.stop`."""

    def send_signal(self, number: signal.Signals) -> None:
        """No effect once it is gone."""

    async def activity_s(self) -> float | None:
        """Like `WorkerHandle.activity_s`."""


class MuxLauncher(Protocol):
    """Starts and restarts one mux on one host.

    `name` is unique in the fleet, `number` on `host`. `log_name` is its log file. `tls` are files of this host whose
    content is sent to the mux over its control link; None if it uses no TLS or reads the files itself.
    """

    name: str
    number: int
    host: str
    log_name: str
    tls: TlsFiles | None

    async def adopt(self) -> MuxHandle | None:
        """The live mux of an earlier daemon. Raises OSError, Unavailable: it cannot be looked for now."""

    async def launch(self, *, beside: bool = False) -> MuxHandle:
        """Start the process, `beside` the one that it is to follow; its control link may not accept connections yet.

        Raises:
            OSError, LaunchFailed, TeimgrError: it could not be started.
        """

    def record(self, mux: MuxHandle) -> None:
        """Keep this one after its successor failed: its control link, and the next daemon finds and replaces it."""

    def clean_up(self) -> None:
        """Remove what a stopped mux has left."""


@dataclass(frozen=True, slots=True)
class MuxRunFile(RunFile):
    """The run file of a mux, with its version and the hash of its configuration."""

    config_hash: str


@dataclass(frozen=True, slots=True)
class MuxPaths:
    """The files of one mux: `name` is unique in the run directory `folder`."""

    folder: Path
    name: str

    @property
    def run_file(self) -> Path:
        return self.folder / f"{self.name}.run"

    @property
    def config(self) -> Path:
        return self.folder / f"{self.name}.config"

    @property
    def socket(self) -> Path:
        return self.folder / f"{self.name}.sock"

    @property
    def former_socket(self) -> Path:
        """The control socket of a mux whose successor was started beside it, by which it is kept if that one fails."""
        return self.folder / f"{self.name}.former.sock"

    def remove(self) -> None:
        for path in (self.run_file, self.socket, self.former_socket, self.config):
            path.unlink(missing_ok=True)


def config_hash(config: MuxConfig) -> str:
    """What a running mux was started with; another one has to be replaced."""
    return f"{code_id()}:{config.hash}"


class LocalMux(ProcessHandle):
    """`MuxHandle` of a process on this host."""

    def __init__(
        self,
        pid: int,
        pidfd: int,
        child: subprocess.Popen[bytes] | None,
        socket: Path,
        log_path: Path,
        log_start: int,
        started_at: float,
        is_current: bool,
    ) -> None:
        super().__init__(pid, pidfd, child)
        self.socket = socket
        self.log_path = log_path
        self.started_at = started_at
        self.is_current = is_current
        self._log_start = log_start

    async def connect(self, limit_s: float) -> MuxLink:
        return await MuxLink.open(str(self.socket), limit_s)

    def describe_exit(self, status: int | None) -> Exit:
        return Exit(status, log=LogSpan(self.log_path, self._log_start, file_size(self.log_path)))


class LocalMuxLauncher:
    """`MuxLauncher` for this host. `log_max_bytes` and `log_keep` limit its log."""

    host = ""
    tls: TlsFiles | None = None

    def __init__(
        self,
        number: int,
        config: MuxConfig,
        log_dir: Path,
        log_max_bytes: int,
        log_keep: int,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.name = f"mux-{number}"
        self.number = number
        self.config = config
        self.log_name = f"_{self.name}.log"  # names of instances do not start with "_"
        self.log_path = log_dir / self.log_name
        self._rotation = log_max_bytes, log_keep
        self._command = command
        self._paths = MuxPaths(Path(config.run_dir), self.name)

    async def adopt(self) -> LocalMux | None:
        found = MuxRunFile.read(self._paths.run_file)
        pidfd = found.open_pidfd() if found else None
        if found is None or pidfd is None:
            return None
        is_current = found.config_hash == config_hash(self.config)
        started_at = found.process.started_at
        socket = self._paths.socket
        return LocalMux(found.pid, pidfd, None, socket, self.log_path, 0, started_at, is_current)

    async def launch(self, *, beside: bool = False) -> LocalMux:
        known_by, more = config_hash(self.config), (BESIDE,) if beside else ()
        return spawn_mux(self._paths, self.config, known_by, self.log_path, *self._rotation, self._command, more)

    def record(self, mux: MuxHandle) -> None:
        with suppress(FileNotFoundError):
            self._paths.former_socket.replace(self._paths.socket)
        if (run_file := MuxRunFile.of(mux.pid, config_hash="")) is not None:
            run_file.write(self._paths.run_file)

    def clean_up(self) -> None:
        self._paths.remove()


def spawn_mux(
    paths: MuxPaths,
    config: MuxConfig,
    known_by: str,
    log_path: Path,
    log_max_bytes: int,
    log_keep: int,
    command: Sequence[str] = COMMAND,
    more: Sequence[str] = (),
) -> LocalMux:
    """Start a mux, which inherits `config.control_fd`; `known_by` is the hash for its run file, `more` are arguments.

    Raises OSError.
    """
    with suppress(FileNotFoundError):
        if BESIDE in more:
            paths.socket.rename(paths.former_socket)
        else:
            paths.socket.unlink()
    write_atomically(paths.config, config.to_json().encode())
    output = open_log(log_path, log_max_bytes, log_keep)
    log_start, started_at = os.fstat(output).st_size, time.time()
    try:
        child = subprocess.Popen(
            [*command, str(paths.config), *more],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | _MALLOC,
            pass_fds=(config.control_fd,) if config.control_fd >= 0 else (),
            start_new_session=True,
        )
    finally:
        os.close(output)
    pidfd = os.pidfd_open(child.pid)  # a child's pid is not reused before it is reaped
    if run_file := MuxRunFile.of(child.pid, config_hash=known_by):
        run_file.write(paths.run_file)
    log.info("mux launched", extra={"mux": paths.name, "pid": child.pid})
    return LocalMux(child.pid, pidfd, child, paths.socket, log_path, log_start, started_at, True)


def mux_config(number: int, settings: Settings, identity: FleetIdentity | None = None) -> MuxConfig:
    """The configuration of a mux on this host; `identity` is that of this node in a fleet of several hosts."""
    files = settings.tls_files
    return MuxConfig(
        host=settings.grpc_host,
        port=settings.grpc_port,
        control_socket=str(settings.run_dir / f"mux-{number}.sock"),
        max_message_bytes=settings.grpc_max_message_size_mb * 2**20,
        max_parallel_streams=settings.grpc_max_parallel_streams,
        request_timeout_s=float(settings.grpc_request_timeout_secs),
        max_connection_age_s=float(settings.grpc_max_connection_age_secs),
        connection_grace_s=float(settings.grpc_max_connection_age_grace_secs),
        orphan_grace_s=float(settings.orphan_grace_secs),
        run_dir=str(settings.run_dir),
        tls=files,
        otel=exporting(settings, f"mux-{number}"),
        processes=settings.mux_processes,
        socket=str(settings.grpc_socket.absolute()) if settings.grpc_socket and number == 0 else "",
        socket_mode=settings.socket_permissions,
        on_demand_models=settings.on_demand.models,
        worker_wait_s=settings.worker_wait_secs,
        log_level=settings.log_level,
        node=identity.node if identity else "",
        identity_dir=str(identity.folder) if identity else "",
    )


def mux_configs(settings: Settings) -> list[MuxConfig]:
    """Those of all muxes of one host."""
    return [mux_config(number, settings) for number in range(settings.mux_processes if settings.grpc_enabled else 0)]


def local_launcher(number: int, settings: Settings, identity: FleetIdentity | None = None) -> LocalMuxLauncher:
    """The launcher of a mux on this host; `identity` as `mux_config`."""
    config = mux_config(number, settings, identity)
    return LocalMuxLauncher(number, config, settings.log_dir, settings.log_max_bytes, settings.log_keep)


class SentCertificates:
    """Reads TLS files for a mux that cannot read them itself, first at its start and then after each change.

    Files are replaced one after another, so a change counts only after two identical readings.
    """

    def __init__(self, files: TlsFiles | None) -> None:
        self.alarm: str | None = None
        self._files = files
        self._sent: Stamp | None = None
        self._seen: Stamp | None = None

    def news(self) -> dict[str, str]:
        """`{"tls": JSON}` where there is something to send, else empty.

        Raises:
            MuxLost: they cannot be used, and none were before.
        """
        if self._files is None:
            return {}
        stamp, settled = self._files.stamp(), self._sent is None
        settled |= stamp == self._seen
        self._seen = stamp
        if stamp == self._sent and stamp is not None:
            self.alarm = None
        if not settled or (stamp == self._sent and stamp is not None):
            return {}
        try:
            pems = self._files.pems()
        except InvalidConfig as error:
            if self._sent is None:
                raise MuxLost(f"cannot use its TLS files: {error.message}") from error
            self.alarm = f"cannot use the changed TLS files, still using the old ones: {error.message}"
            return {}
        self._sent, self.alarm = stamp, None
        texts = {"cert": pems.cert.decode(), "key": pems.key.decode(), "ca": pems.ca.decode() if pems.ca else None}
        return {"tls": json.dumps(texts)}
