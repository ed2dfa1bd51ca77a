"""The product's own fork server, one for a run of tests, so that torch is imported once.

It forks workers for tests of a worker, and fork servers for the daemons of tests that are not about their start:

    TESTS_NURSERIES=SOCKET python -m tests.support.fork_server serve …

is `teimgr` whose fork server is a copy of that of the test process (`nursery_service`), as the imports are most of what
a daemon costs. Another server forks such daemons themselves, and muxes (`fork_program`), a third the fork servers of
scripted workers (`forked_nursery`).
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from teimgr.control.launch.nursery_link import NurseryLink, NurseryProcess
from teimgr.spec import WorkerSpec

_MESSAGE_BYTES = 128 * 1024
_START_LIMIT_S = 120.0
SERVICE = "TESTS_NURSERIES"
_ROOT = Path(__file__).resolve().parents[2]
_ENVIRON = dict(os.environ)
"""As it is before a test changes it."""
_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
_PYTHONPATH = f"{_ROOT}:{_ROOT / 'src'}"
_SET_BY_LIBRARIES = ("KMP_", "PYTEST_", "RAYON_", "TORCH")  # torch as it is imported, and a load in this process


server_pids: set[int] = set()
"""The fork servers of this process."""


class ForkedProcess:
    """A forked worker with the part of `subprocess.Popen` that tests use."""

    def __init__(self, server: ForkServer, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._server = server
        self._pidfd = pidfd

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens once the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, as `subprocess` gives it.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._server.status_of(self.pid)

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self.wait() if select.select([self._pidfd], [], [], 0)[0] else None


class ForkServer:
    """`python -m teimgr.control.launch.nursery`, asked for workers over its control socket."""

    def __init__(self, *options: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        self._requests = 0
        self._log = Path(tempfile.mkstemp(prefix="t")[1])
        with theirs, self._log.open("wb") as output:
            self._process = self._start(theirs, output, options)
        self._control.settimeout(_START_LIMIT_S)
        assert "threads" in json.loads(self._control.recv(_MESSAGE_BYTES))
        atexit.register(self.close)

    def _start(
        self, theirs: socket.socket, output: IO[bytes], options: Sequence[str]
    ) -> subprocess.Popen[bytes] | None:
        """A new process; None where it is a copy of that of `python -m tests`, which is of the usual kind."""
        if SERVICE in _ENVIRON and not options:
            os.close(copy_at(_ENVIRON[SERVICE], theirs)[1])
            return None
        environ = _ENVIRON | {
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": _PYTHONPATH,
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "teimgr.control.launch.nursery", str(theirs.fileno()), *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environ,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        server_pids.add(process.pid)
        return process

    def fork(
        self,
        listener: int,
        log: int,
        incarnation: str,
        run_dir: str,
        spec: str,
        ports: Mapping[int, int] = MappingProxyType({}),
    ) -> ForkedProcess:
        """A new worker on the listening socket `listener` and those of `ports`, with its output in `log`."""
        request = {"incarnation": incarnation, "run_dir": run_dir, "spec": spec, "ports": list(ports)}
        message, descriptors = self._request(request, [listener, log, *ports.values()])
        return ForkedProcess(self, message["pid"], descriptors[0])

    def fork_nursery(self, control: int) -> tuple[int, int]:
        """A copy of the fork server that serves the socket `control`; the result is its pid and a pidfd."""
        message, descriptors = self._request({"standby": True}, [control])
        return message["pid"], descriptors[0]

    def status_of(self, pid: int) -> int:
        """The exit status of a process that has ended."""
        with self._lock:
            while pid not in self._statuses:
                self._receive()
            return self._statuses[pid]

    def close(self) -> None:
        """End the server; its workers have ended."""
        self._control.close()
        if self._process is not None:
            self._process.wait(_START_LIMIT_S)
        self._log.unlink()

    def _request(self, request: dict[str, Any], sent: list[int]) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            self._requests += 1
            socket.send_fds(self._control, [json.dumps(request | {"id": self._requests}).encode()], sent)
            while True:
                message, descriptors = self._receive()
                if message.get("id") == self._requests:
                    assert "error" not in message, message
                    return message, descriptors

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        payload, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 1)
        assert payload, self._log.read_text()
        message = json.loads(payload)
        if "status" in message:
            self._statuses[message["pid"]] = message["status"]
        return message, list(descriptors)


@cache
def fork_server() -> ForkServer:
    """The fork server of this test process."""
    return ForkServer()


@cache
def scripted_server() -> ForkServer:
    """The fork server of this test process that has imported the scripted worker and nothing else."""
    return ForkServer("--entry", "tests.support.fakes.worker:main", "--preload", "")


def forked_nursery(owner: NurseryLink) -> NurseryProcess:
    """A nursery of scripted workers that has nothing to import: a copy of `scripted_server`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = scripted_server()
    with theirs:
        pid, pidfd = server.fork_nursery(theirs.fileno())
    return NurseryProcess(owner, pid, pidfd, ours, _Copy(server, pid))  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Copy:
    """A nursery as a child that one can wait for; its parent is the fork server."""

    server: ForkServer
    pid: int

    def wait(self) -> int:
        return self.server.status_of(self.pid)


@cache
def nursery_service() -> str:
    """Path of a unix socket where daemons send the control socket of their fork server, and get its pid and pidfd.

    That of `python -m tests`, which is for all of its processes, else one of this process.
    """
    if SERVICE in _ENVIRON:
        return _ENVIRON[SERVICE]
    path = f"{tempfile.mkdtemp(prefix='t')}/nurseries"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()

    def serve() -> None:
        server = fork_server()  # whoever asks before it has imported everything waits
        while True:
            connection, _ = listener.accept()
            with connection:
                _, (control,), _, _ = socket.recv_fds(connection, 1, 1)
                pid, pidfd = server.fork_nursery(control)
                socket.send_fds(connection, [str(pid).encode()], [pidfd])
                os.close(control)
                os.close(pidfd)

    threading.Thread(target=serve, name="nurseries", daemon=True).start()
    return path


def copy_at(path: str, control: socket.socket) -> tuple[int, int]:
    """Have the `nursery_service` at `path` make a fork server that serves `control`; the result is pid and pidfd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as service:
        service.connect(path)
        socket.send_fds(service, [b"!"], [control.fileno()])
        pid, (pidfd,), _, _ = socket.recv_fds(service, 32, 1)
    return int(pid), pidfd


def _copied(link: NurseryLink) -> NurseryProcess:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        pid, pidfd = copy_at(os.environ[SERVICE], theirs)
    return NurseryProcess(link, pid, pidfd, ours)


@cache
def program_server() -> ForkServer:
    """The fork server of this test process that has imported the daemon and the mux."""
    modules = ("teimgr.cli.daemon_commands", "teimgr.daemon.process", "teimgr.mux.process")
    return ForkServer("--entry", f"{__name__}:run_program", "--preload", ",".join(modules))


def fork_program(
    main: str, arguments: Sequence[str], output: int, folder: Path, environ: Mapping[str, str]
) -> ForkedProcess | None:
    """A process that calls `main`, as `module:function`, with its command line and has nothing to import; its output
    goes to a descriptor. None where the test has changed the limit of open files, or the environment, which modules may
    read as they are imported.
    """
    now = dict(os.environ)
    changed = {name for name, _ in now.items() ^ _ENVIRON.items()}
    if now.get("PYTHONPATH") == _PYTHONPATH:  # as in the server
        changed.discard("PYTHONPATH")
    is_as_before = all(name.startswith(_SET_BY_LIBRARIES) for name in changed)
    if not is_as_before or resource.getrlimit(resource.RLIMIT_NOFILE) != _OPEN_FILES:
        return None
    told = {"main": main, "arguments": arguments, "environ": now | dict(environ), "cwd": str(Path.cwd())}
    (folder / "program.json").write_text(json.dumps(told))
    spec = WorkerSpec(name="program", model_id=main, port=0, nice=0).to_json()
    return program_server().fork(output, output, "fork", str(folder), spec)


def run_program(output: int, incarnation: str, run_dir: str, spec: str, ports: str) -> int:
    """The entry of `program_server`."""
    os.close(output)  # it is stdout and stderr too
    told = json.loads(Path(run_dir, "program.json").read_text())
    os.environ.clear()
    os.environ.update(told["environ"])
    os.chdir(told["cwd"])
    module, _, function = told["main"].partition(":")
    sys.argv = [module, *told["arguments"]]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    status: int = getattr(importlib.import_module(module), function)(sys.argv)
    return status


def daemon_with_copy(arguments: list[str]) -> int:
    """`teimgr` whose fork server is a copy."""
    from teimgr.cli.main import main

    NurseryLink._spawn = _copied  # type: ignore[method-assign]
    return main(arguments[1:])


if __name__ == "__main__":
    sys.exit(daemon_with_copy(sys.argv))
