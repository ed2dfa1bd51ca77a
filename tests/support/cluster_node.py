"""`teimgr node join` as a process for a test, beside the daemon whose cluster it joins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Self

from tests.support.daemon_process import DaemonProcess, kill_ray
from tests.support.fork_server import nursery_service
from tests.support.warm_daemon import SERVICE

STOP_LIMIT_S = 60.0


class NodeProcess:
    """A host named `name` of the daemon's cluster, whose folder lies in the daemon's."""

    def __init__(self, daemon: DaemonProcess, name: str, address: str) -> None:
        self.state_dir = daemon.folder / name
        self.name = name
        cluster = daemon.settings["cluster"]
        self.arguments = ["--grace", "20", "--name", name, "--host-address", address]
        self.arguments += ["--enrolment-port", str(cluster["enrolment_port"])]
        self._head = cluster["address"]
        self._daemon = daemon
        self.program = "tests.support.warm_daemon"
        """Or `teimgr`, whose fork server is its own and is in its namespaces."""
        self.process: subprocess.Popen[bytes] | None = None
        self.within: Sequence[str] = ()
        """A command that runs the node's, such as one that enters a namespace."""
        self.environ: dict[str, str] = {}
        """More of its environment."""

    def join_instead(self, daemon: DaemonProcess) -> None:
        """Have the next `start` join the cluster of another daemon, with the certificate that it has."""
        cluster = daemon.settings["cluster"]
        self._daemon, self._head = daemon, cluster["address"]
        self.arguments[-1] = str(cluster["enrolment_port"])

    def start(self, *more: str) -> Self:
        """Launch it; the first time it joins with a token of the daemon, which must run."""
        self.state_dir.mkdir(exist_ok=True)
        if not (self.state_dir / "identity").exists():
            with self._daemon.client() as client:
                token = client.create_join_token()["token"]
            (self.state_dir / "join-token").write_text(token)
            more = ("--token-file", str(self.state_dir / "join-token"), *more)
        command = [sys.executable, "-m", self.program, "node", "join", self._head]
        command += ["--state-dir", str(self.state_dir)]
        with (self.state_dir / "node.log").open("ab") as output:
            self.process = subprocess.Popen(
                [*self.within, *command, *self.arguments, *more],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"HF_HUB_OFFLINE": "1", SERVICE: nursery_service()} | self.environ,
                start_new_session=True,
            )
        return self

    def kill(self) -> None:
        """SIGKILL the node's process alone; Ray and the workers go on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return (self.state_dir / "node.log").read_text()

    def close(self) -> None:
        """Stop it, and kill what is left of it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        kill_ray(self.state_dir / "run")
