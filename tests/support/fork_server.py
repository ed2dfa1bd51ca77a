"""The product's own fork server, one per test process, so that torch is imported once.

It forks workers for tests of a worker, and fork servers for the daemons of tests that are not about their start:

    TEIMGR_TEST_NURSERIES=SOCKET python -m tests.support.fork_server serve …

is `teimgr` whose fork server is a copy of that of the test process (`nursery_service`), as the imports are most of what
a daemon costs. Another server forks the fork servers of scripted workers (`forked_nursery`).
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from teimgr.control.launch.nursery_link import NurseryLink, NurseryProcess

_MESSAGE_BYTES = 128 * 1024
_START_LIMIT_S = 120.0
SERVICE = "TEIMGR_TEST_NURSERIES"
_ROOT = Path(__file__).resolve().parents[2]


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
            TimeoutError: it still runs.
        """
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise TimeoutError(f"process {self.pid} runs after {timeout} s")
        return self._server.status_of(self.pid)


class ForkServer:
    """`python -m teimgr.control.launch.nursery`, asked for workers over its control socket."""

    def __init__(self, *options: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        self._requests = 0
        self._log = Path(tempfile.mkstemp(prefix="t")[1])
        environ = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": f"{_ROOT}:{_ROOT / 'src'}",
        }
        with theirs, self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "teimgr.control.launch.nursery", str(theirs.fileno()), *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control.settimeout(_START_LIMIT_S)
        assert "threads" in json.loads(self._control.recv(_MESSAGE_BYTES))
        atexit.register(self.close)

    def fork(self, listener: int, log: int, incarnation: str, run_dir: str, spec: str) -> ForkedProcess:
        """A new worker on the listening socket `listener`, with its output in `log`."""
        request = {"incarnation": incarnation, "run_dir": run_dir, "spec": spec, "ports": []}
        message, descriptors = self._request(request, [listener, log])
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
    """Path of a unix socket where daemons send the control socket of their fork server, and get its pid and pidfd."""
    server = fork_server()
    path = f"{tempfile.mkdtemp(prefix='t')}/nurseries"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()

    def serve() -> None:
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


def _copied(link: NurseryLink) -> NurseryProcess:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as service:
        service.connect(os.environ[SERVICE])
        socket.send_fds(service, [b"!"], [theirs.fileno()])
        pid, (pidfd,), _, _ = socket.recv_fds(service, 32, 1)
    return NurseryProcess(link, int(pid), pidfd, ours)


def _main() -> int:
    """`teimgr` with such a fork server."""
    from teimgr.cli.main import main

    NurseryLink._spawn = _copied  # type: ignore[method-assign]
    return main()


if __name__ == "__main__":
    sys.exit(_main())
