"""A real daemon from this checkout, on free ports and in a folder of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil

from bench.machine import cpu_s
from teimgr.client import Client
from teimgr.errors import Unavailable

_LISTEN_S = 60.0
_STOP_S = 60.0
_PORTS = 64
_MUX_MODULES = {"teimgr.mux.process", "teimgr.front.mux"}  # here, and in checkouts until 534a7b9
_fleets = count()


@dataclass(frozen=True)
class Fleet:
    """The daemon's process and addresses, and an open client."""

    process: psutil.Process
    api_port: int
    grpc: str
    client: Client
    api_socket: Path
    grpc_socket: Path

    @property
    def grpc_port(self) -> int:
        return int(self.grpc.rpartition(":")[2])

    def pids(self, instance: str) -> dict[str, int]:
        """The daemon, the mux and the worker of an instance with one replica."""
        worker = self.client.get(instance).pid
        assert worker is not None
        return {"daemon": self.process.pid, "mux": self.muxes()[0].pid, "worker": worker}

    def muxes(self) -> list[psutil.Process]:
        """The multiplexer processes."""
        return [each for each in self.process.children() if not _MUX_MODULES.isdisjoint(each.cmdline())]

    def cpu_s(self) -> float:
        """CPU seconds of the daemon and everything it started that still runs."""
        family = [self.process, *self.process.children(recursive=True)]
        return sum(cpu_s(member.pid) for member in family)


@contextmanager
def fleet(
    checkout: Path | None = None,
    state: bytes | None = None,
    listen_s: float = _LISTEN_S,
    config: str | None = None,
    api_key: str | None = None,
    **keys: str,
) -> Iterator[Fleet]:
    """A running `teimgr serve`, of this or another checkout, stopped with its workers when the block ends.

    `state` is the content of its state file and `config` that of its configuration, `listen_s` how long it may take to
    listen, `api_key` the key of the client, `keys` are further settings.

    Raises:
        RuntimeError: it did not start to listen; the message has the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        api, grpc, first = _free_ports()
        settings = {
            "TEIMGR_API_PORT": str(api),
            "TEIMGR_GRPC_PORT": str(grpc),
            "TEIMGR_INSTANCE_PORT_START": str(first),
            "TEIMGR_INSTANCE_PORT_END": str(first + _PORTS),
            "TEIMGR_PROMETHEUS_PORT_START": str(first + 100 * _PORTS),  # other daemons of this machine have 9100
            "TEIMGR_STATE_FILE": str(folder / "state.toml"),
            "TEIMGR_API_SOCKET": str(folder / "api.sock"),
            "TEIMGR_GRPC_SOCKET": str(folder / "grpc.sock"),
            **{f"TEIMGR_{name.upper()}": value for name, value in keys.items()},
        }
        if state is not None:
            (folder / "state.toml").write_bytes(state)
        if config is not None:
            (folder / "teimgr.toml").write_text(config)
        with (folder / "daemon.log").open("wb") as log:
            command = [
                sys.executable,
                "-m",
                "teimgr",
                "serve",
                *(["-c", str(folder / "teimgr.toml")] if config is not None else []),
            ]
            if checkout is not None:
                settings["PYTHONPATH"] = str(checkout / "src")
            # In a session of its own: an interrupt from the terminal is for this process, which stops the daemon.
            environ = os.environ | settings
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            addresses = f"http://127.0.0.1:{api}", f"http://127.0.0.1:{grpc}"
            with Client(*addresses, timeout_s=120, api_key=api_key) as client:
                _await_listening(client, process, folder / "daemon.log", listen_s)
                address = f"http://127.0.0.1:{grpc}"
                sockets = (folder / "api.sock", folder / "grpc.sock")
                yield Fleet(psutil.Process(process.pid), api, address, client, *sockets)
        except Unavailable as error:
            raise RuntimeError(f"{error}; the daemon's last words:\n{_tail(folder / 'daemon.log')}") from error
        finally:
            _stop(process)


def _free_ports() -> tuple[int, int, int]:
    """Two free ports, and the first of a range above them."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        api, grpc = one.getsockname()[1], two.getsockname()[1]
    return api, grpc, 20_000 + (os.getpid() + next(_fleets) * 50) % 100 * _PORTS


def _await_listening(client: Client, process: subprocess.Popen[bytes], log: Path, listen_s: float) -> None:
    end = time.monotonic() + listen_s
    while process.poll() is None and time.monotonic() < end:
        try:
            client.health()
        except Unavailable:
            time.sleep(0.02)
        else:
            return
    raise RuntimeError(f"the daemon does not listen:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
