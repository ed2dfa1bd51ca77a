"""Ray's own processes on one host: `ray start --block` in its own session, kept running, adopted, ended by pid.

The command ends all that it started when it ends, even when it is killed. It survives the daemon or node agent that
started it; the next one finds it by its run file.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from teimgr.cluster.messages import AGENT_VARIABLE
from teimgr.config.sections import ClusterSettings
from teimgr.control.launch.process_handle import LaunchFailed, ProcessHandle, RunFile, make_private
from teimgr.errors import InvalidConfig
from teimgr.observability.logs import last_line, open_log

RAY_DIR_BYTES = 40
"""Ray puts unix sockets some 65 bytes below its folder."""
_RUN_FILE = "ray.run"
_SERVERS = (
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
)
_LOG_LIMIT_BYTES = 4 << 20
_END_GRACE_S = 5.0
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 15.0
_STABLE_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHost:
    """What Ray is started with on a host. `node_ip` is the address by which other hosts reach this one.

    `ports` are those that Ray listens on beside that of the head; empty: any that are free.
    """

    node_ip: str
    ray_dir: Path
    token_file: Path
    agent_socket: Path
    cores: int
    ports: range = range(0)

    def environ(self) -> dict[str, str]:
        """The environment of everything of Ray: token authentication, no usage statistics, one address, the agent's
        socket."""
        return {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_file.absolute()),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_START_HOOK": "teimgr.cluster.ray_start_hook.without_client_server",
            AGENT_VARIABLE: str(self.agent_socket),
            **listening_on(self.node_ip),
        }

    def node_command(self, address: str, object_store_mb: int) -> list[str]:
        """The command of a host that joins the head at `address`."""
        return [*self._start(object_store_mb), f"--address={address}"]

    def head_command(self, settings: ClusterSettings, store_dir: Path) -> list[str]:
        """The command of the head, whose configuration Ray gives to every host that joins."""
        system: dict[str, object] = {
            "health_check_initial_delay_ms": round(settings.health_check_period_secs * 1000),
            "health_check_period_ms": round(settings.health_check_period_secs * 1000),
            "health_check_timeout_ms": round(settings.health_check_timeout_secs * 1000),
            "health_check_failure_threshold": settings.health_check_failures,
            "gcs_rpc_server_reconnect_timeout_s": settings.head_outage_secs,
        }
        if settings.store == "rocksdb":
            system |= {"gcs_storage": "rocksdb", "gcs_storage_path": str(store_dir)}
        return [
            *self._start(settings.object_store_mb),
            "--head",
            f"--port={settings.port}",
            "--include-dashboard=false",
            "--no-monitor",
            f"--system-config={json.dumps(system)}",
        ]

    def _start(self, object_store_mb: int) -> list[str]:
        return [
            *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
            *("--include-log-monitor=false", "--num-gpus=0", f"--num-cpus={self.cores}"),
            f"--node-ip-address={self.node_ip}",
            f"--object-store-memory={object_store_mb << 20}",
            f"--temp-dir={self.ray_dir}",
            *self._port_options(),
        ]

    def _port_options(self) -> list[str]:
        if not self.ports:
            # Any free ones; Ray's own choice, 10002 to 19999, would clash with ports of instances and of the head.
            return ["--min-worker-port=0", "--max-worker-port=0"]
        servers = [f"--{name}={port}" for name, port in zip(_SERVERS, self.ports, strict=False)]
        return [*servers, f"--min-worker-port={self.ports[len(_SERVERS)]}", f"--max-worker-port={self.ports[-1]}"]


@dataclass(frozen=True, slots=True)
class RayRunFile(RunFile):
    """The run file of Ray's process. `head` is the address of the head that it belongs to."""

    head: str = ""


class RayProcess:
    """Keeps `command` running from `start` to `stop`. `environ` is its environment, `ray_dir` Ray's folder, `head` the
    address of the head that the command starts or joins.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        run_dir: Path,
        ray_dir: Path,
        log_path: Path,
        head: str,
    ) -> None:
        self._command = command
        self._head = head
        # The address of the last head here. Ray would look for it in the command lines of all processes of the machine,
        # find those of other hosts that run on it for a trial, and not start.
        self._last_address = ray_dir / "ray_current_cluster"
        self._environ = environ
        self._run_file = run_dir / _RUN_FILE
        self._log_path = log_path
        self._handle: ProcessHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self.problem = ""
        """How Ray ended last, while it is not started again for good."""

    @property
    def pid(self) -> int | None:
        return self._handle.pid if self._handle else None

    async def start(self) -> None:
        """Adopt the process of an earlier daemon or node agent, or start one; later, start another whenever it ends.

        One of another head, which may be lost, is ended first.

        Raises:
            LaunchFailed: it cannot be started, or the one of another head does not die.
        """
        found = RayRunFile.read(self._run_file)
        adopted = ProcessHandle.adopt(found) if found else None
        if adopted is not None and found is not None and found.head not in ("", self._head):
            log.warning("ending a Ray process of another head", extra={"head": found.head, "pid": found.pid})
            await adopted.stop(_END_GRACE_S)
            adopted = None
        self._handle = adopted or self._spawn()
        self._task = asyncio.create_task(self._keep_running(self._handle), name="Ray")

    async def stop(self) -> None:
        """End Ray on this host, and with it the actors here."""
        await self.release()
        if self._handle is not None:
            try:
                await self._handle.stop(_END_GRACE_S)
            except LaunchFailed as error:
                log.error("Ray does not die", extra={"reason": str(error)})
        self._run_file.unlink(missing_ok=True)

    async def release(self) -> None:
        """Stop watching. Ray keeps running."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def _keep_running(self, handle: ProcessHandle) -> None:
        clock, pause_s = asyncio.get_running_loop().time, _FIRST_PAUSE_S
        while True:
            began = clock()
            exit = await handle.wait()
            # Killed, it may leave some of Ray's servers for a moment.
            with suppress(ProcessLookupError):
                os.killpg(handle.pid, signal.SIGKILL)
            self.problem = f"Ray ended with status {exit.status}: {last_line(self._log_path)}"
            log.error("Ray ended on this host: %s", self.problem)
            if clock() - began > _STABLE_S:
                pause_s = _FIRST_PAUSE_S
            while True:
                await asyncio.sleep(pause_s)
                pause_s = min(_MAX_PAUSE_S, pause_s * 2)
                try:
                    handle = self._handle = self._spawn()
                    break
                except LaunchFailed as error:
                    log.error("Ray cannot be started", extra={"reason": str(error)})

    def _spawn(self) -> ProcessHandle:
        try:
            self._last_address.unlink(missing_ok=True)
            output = open_log(self._log_path, _LOG_LIMIT_BYTES, 1)
            try:
                handle = ProcessHandle.spawn(self._command, output, self._environ)
            finally:
                os.close(output)
            if run_file := RayRunFile.of(handle.pid, head=self._head):
                run_file.write(self._run_file)
        except OSError as error:
            raise LaunchFailed(f"Ray cannot be started: {error}") from error
        return handle


def ensure_token(path: Path) -> None:
    """Make Ray's token if it is missing; only its owner can read it.

    Raises:
        InvalidConfig: the file cannot be made, or others can read it.
    """
    try:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            check_token(path)
            return
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    except OSError as error:
        raise InvalidConfig(f"cluster.token_file: {path}: {error.strerror}") from error


def check_token(path: Path) -> None:
    """Check that Ray's token exists and only its owner can read it.

    Raises:
        InvalidConfig: it is not.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise InvalidConfig(f"cluster.token_file: {path}: {error.strerror}") from error
    if mode & 0o077:
        raise InvalidConfig(f"cluster.token_file: other users can read {path}; chmod 600 it")


def ray_folder(wanted: Path | None, run_dir: Path) -> Path:
    """The folder of Ray's sessions, made private: the wanted one, or `ray` in the run directory if its path is short.

    Raises:
        InvalidConfig: it is too long, or cannot be used.
    """
    folder = (wanted or run_dir / "ray").absolute()
    if wanted is None and len(os.fsencode(folder)) > RAY_DIR_BYTES:
        # `make_private` refuses it where it is another user's.
        folder = Path(f"/tmp/teimgr-ray-{os.geteuid()}")  # noqa: S108  # nosec B108
    if len(os.fsencode(folder)) > RAY_DIR_BYTES:
        raise InvalidConfig(f"cluster.ray_dir: {folder} is longer than {RAY_DIR_BYTES} bytes")
    make_private(folder)
    return folder / "s"  # which Ray opens to all users


UNRESTRICTED = (
    "Ray listens on all addresses of this host: its library listen_address was not built, as pip found no C compiler"
)
_VARIABLE = "TEIMGR_LISTEN_ADDRESS"
_PRELOADED = "LD_PRELOAD"


def library() -> Path | None:
    """The compiled library; None if the package was built without a compiler."""
    folder = Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if (path := folder / f"_listen_address{suffix}").exists():
            return path
    return None


def listening_on(address: str) -> Mapping[str, str]:
    """Environment variables of a process whose sockets for all addresses shall listen on `address`, a numeric one.

    Empty without the library.
    """
    path = library()
    if path is None:
        return {}
    others = os.environ.get(_PRELOADED, "")
    return {_VARIABLE: address, _PRELOADED: f"{path}:{others}" if others else str(path)}
