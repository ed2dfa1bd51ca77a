"""A real daemon for a test: its own state, ports of its own, and a count of everything it could leave behind."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil
from tests.support.polling import until

from teimgr.client import AsyncClient, Client
from teimgr.control.launch.process_handle import look_up

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
LISTEN_LIMIT_S = 60.0
STOP_LIMIT_S = 40.0
PORTS_EACH = 40  # for a daemon's instances, and as many for their metrics
FIRST_PORT = 15_000
PORTS_OF_A_PROCESS = 4_000
CLUSTER_VARIABLE = "TEIMGR_TEST_CLUSTER"
"""Set to 1, it has every daemon of the tests run its workers by Ray, as the head of a cluster of one host."""
HEAD_ADDRESS = "127.0.0.2"
MAX_HELD_S = 0.3
"""Processor time for which an event loop of a daemon, its muxes and workers may be held at a time."""
_WORKED = re.compile(r'processor_seconds"?[=:] ?([0-9.]+)')


_open: set[DaemonProcess] = set()


def close_all() -> None:
    """Close the daemons of this process that are started and not closed yet."""
    for daemon in tuple(_open):
        daemon.close()


class DaemonProcess:
    """`teimgr serve` with a state folder of its own. Started by `start`, or as a context manager.

    `program` may be another module with the same command line.
    """

    program = "teimgr"
    listen_limit_s = LISTEN_LIMIT_S

    def __init__(self, **settings: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tm"))
        self.api_port, self.grpc_port, *block = free_ports(2 + 2 * PORTS_EACH)
        self.settings: dict[str, Any] = {
            "api_port": self.api_port,
            "grpc_port": self.grpc_port,
            "instance_port_start": block[0],
            "instance_port_end": block[PORTS_EACH - 1] + 1,
            "prometheus_port_start": block[PORTS_EACH],
            "state_file": str(self.folder / "state.toml"),
            "health_check_interval_secs": 1,
            "graceful_shutdown_timeout_secs": 10,
            "restart_backoff_secs": 0.05,
            **settings,
        }
        if os.environ.get(CLUSTER_VARIABLE) == "1" and "cluster" not in settings:
            self.settings["cluster"] = cluster_table(HEAD_ADDRESS, "one")
        self.process: Any = None
        """A `Popen`, or what has its part that is used here."""
        self.may_hold_loops = False
        self.within: Sequence[str] = ()
        """A command that runs the daemon's, such as one that makes a namespace."""

    # Life.

    def start(self, environ: Mapping[str, str] | None = None) -> Self:
        """Launch it and return once REST answers; of one that does not, nothing but its files is left."""
        _open.add(self)
        try:
            self._launch(environ)
            self._await_listening()
        except BaseException:
            self._end()
            raise
        return self

    def _launch(self, environ: Mapping[str, str] | None) -> None:
        config = self.folder / "teimgr.toml"
        config.write_text(toml(self.settings))
        with (self.folder / "daemon.log").open("ab") as output:
            self.process = self._spawn(config, output, environ) or subprocess.Popen(
                [*self.within, sys.executable, "-m", self.program, "serve", "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"HF_HUB_OFFLINE": "1"} | dict(environ or {}),
                start_new_session=True,
            )

    def _spawn(self, config: Path, output: IO[bytes], environ: Mapping[str, str] | None) -> Any:
        """The process where it is no new one of the command; it has the part of `Popen` that is used here."""

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL the daemon alone: workers, muxes and the nursery are not asked."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM and wait; the result is the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_LIMIT_S)

    def close(self) -> None:
        """Stop it, kill whatever of it is left, remove its folder.

        Raises:
            AssertionError: an event loop was held for `MAX_HELD_S` of processor time, and `may_hold_loops` is not set.
        """
        self._end()
        held = [] if self.may_hold_loops else self.held_loops(MAX_HELD_S)
        shutil.rmtree(self.folder, ignore_errors=True)
        _open.discard(self)
        assert not held, "\n".join(("event loops were held:", *held))

    def _end(self) -> None:
        if self.is_running:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.process.kill()
        kill_ray(self.folder / "run")
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.log())
            self.may_hold_loops = True  # the error is what counts
        self.close()

    # Talking to it.

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.api_port}"

    @property
    def grpc(self) -> str:
        return f"http://{self._grpc_host}:{self.grpc_port}"

    @property
    def _grpc_host(self) -> str:
        return str(self.settings.get("grpc_host", "127.0.0.1"))

    def client(self, **how: Any) -> Client:
        return Client(self.api, self.grpc, **how)

    def async_client(self, **how: Any) -> AsyncClient:
        return AsyncClient(self.api, self.grpc, **how)

    def log(self, lines: int = 60) -> str:
        """The end of the daemon's log and of every instance's."""
        files = [self.folder / "daemon.log", *sorted((self.folder / "logs").glob("*.log"))]
        return "\n".join(f"── {path.name}\n" + tail(path, lines) for path in files if path.exists())

    def held_loops(self, worked_s: float = 0.0) -> list[str]:
        """The log lines of watchdogs whose event loop was held for over 200 ms, `worked_s` of processor time at least.

        Processor time does not count how long a process waited for others on a busy machine.
        """
        files = [self.folder / "daemon.log", *sorted((self.folder / "logs").glob("*.log"))]
        lines = (line for path in files if path.exists() for line in path.read_text(errors="replace").splitlines())
        held = (
            (line, _WORKED.search(line)) for line in lines if "event loop held" in line
        )  # a crash report quotes some
        return [line for line, worked in held if worked is not None and float(worked[1]) >= worked_s]

    # What it could leave behind.

    def processes(self) -> list[psutil.Process]:
        """Every live process with this daemon's folder in its arguments or environment, itself excepted."""
        found = []
        for process in psutil.process_iter():
            try:
                told = f"{' '.join(process.cmdline())} {process.environ().get('TEIMGR_TEST', '')}"
                files = [file.path for file in process.open_files()]
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            mine = str(self.folder) in told or any(path.startswith(str(self.folder)) for path in files)
            if mine and (self.process is None or process.pid != self.process.pid):
                found.append(process)
        return found

    def run_files(self) -> list[str]:
        """What lies in the run directory."""
        run = self.folder / "run"
        return sorted(path.name for path in run.iterdir()) if run.exists() else []

    def await_grpc(self) -> None:
        """Return when the gRPC port, which a process of its own opens, takes connections."""
        self._await_port(self.grpc_port, self._grpc_host)

    def _await_listening(self) -> None:
        self._await_port(self.api_port)

    def _await_port(self, port: int, host: str = "127.0.0.1") -> None:
        process = self.process
        assert process is not None

        def listens() -> bool:
            assert process.poll() is None, f"the daemon ended:\n{self.log()}"
            with socket.socket() as probe:
                return probe.connect_ex((host, port)) == 0

        until(listens, f"a listener on port {port}", self.listen_limit_s)


class WarmDaemonProcess(DaemonProcess):
    """A daemon that has nothing to import, nor its fork server, for tests that are not about starts and left-over
    processes.

    Its fork server has the environment of the tests, and is not among `processes`. Its instances may run before the mux
    listens, so `start` waits for both. Where `start` is given an environment, the daemon is a new process that imports.
    """

    program = "tests.support.fork_server"
    is_new = False
    """Whether it is one in any case."""

    def start(self, environ: Mapping[str, str] | None = None) -> Self:
        from tests.support.fork_server import SERVICE, nursery_service

        self.is_new = self.is_new or bool(environ or self.within) or self.program != WarmDaemonProcess.program
        super().start({SERVICE: nursery_service()} | dict(environ or {}))
        try:
            self.await_grpc()
        except BaseException:
            self._end()
            raise
        return self

    def _spawn(self, config: Path, output: IO[bytes], environ: Mapping[str, str] | None) -> Any:
        from tests.support.fork_server import fork_program

        if self.is_new:
            return None
        main, arguments = f"{self.program}:daemon_with_copy", ("serve", "-c", str(config))
        given = {"HF_HUB_OFFLINE": "1"} | dict(environ or {})
        return fork_program(main, arguments, output.fileno(), self.folder, given)


def cluster_table(host: str, node: str, **more: Any) -> dict[str, Any]:
    """`[cluster]` of a daemon on `host`, with ports that are free."""
    port, enrolment_port = free_ports(2)
    return {"address": f"{host}:{port}", "enrolment_port": enrolment_port, "node": node, **more}


def free_ports(count: int) -> list[int]:
    """Ports on which no process listens now, ascending; below those the system gives to clients, never the same twice.

    Each process of a parallel run has a share of its own.
    """
    found: list[int] = []
    while len(found) < count:
        port = next(_ports)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        if found and port < found[0]:  # the share began anew
            found.clear()
        found.append(port)
    return found


def _share() -> Iterator[int]:
    process = int(os.environ.get("TESTS_PROCESS", "0"))
    first = FIRST_PORT + process % 4 * PORTS_OF_A_PROCESS
    offset = random.randrange(PORTS_OF_A_PROCESS)  # another run of tests may be going on
    return (first + (offset + step) % PORTS_OF_A_PROCESS for step in itertools.count())


_ports = _share()


def kill_ray(run_dir: Path) -> None:
    """Kill the Ray whose run file lies there, and wait until it is gone."""
    path = run_dir / "ray.run"
    if path.exists():
        pid = json.loads(path.read_text())["pid"]
        if look_up(pid):
            os.kill(pid, signal.SIGKILL)
            until(lambda: not look_up(pid), "the end of Ray")


def tail(path: Path, lines: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def toml(settings: Mapping[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(settings)
