"""An upgrade under load: the next version takes over the daemon, then the muxes and the workers, and no call fails.

The two versions are copies of this checkout, or another checkout and this one: UPGRADE_FROM=PATH python -m pytest …
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.rolling_load import SteadyLoad
from tests.support.daemon_process import DaemonProcess, toml
from tests.support.fork_server import SERVICE, nursery_service
from tests.support.models import build
from tests.support.polling import until

import teimgr
from teimgr.client import Client

LIMIT_S = 300.0
_NEXT = "99.0.0"
_HERE = Path(teimgr.__file__).parents[2]
_PROGRAM = """#!{python}
import os, sys
sys.path.insert(0, {path!r})
os.environ["PYTHONPATH"] = {path!r}
from teimgr.cli.main import main
sys.exit(main())
"""
# Its fork server is a copy of the tests' own, which has this checkout's version.
_WITH_COPY = """#!{python}
import os, sys
sys.path[:0] = [{path!r}, {root!r}]
os.environ["PYTHONPATH"] = {path!r}
from tests.support.fork_server import daemon_with_copy
sys.exit(daemon_with_copy(sys.argv))
"""


class Upgraded(DaemonProcess):
    """A daemon whose program is a link, `current`, that leads to one version or another."""

    def install(self, name: str, source: Path, version: str | None = None) -> None:
        """Install the package of a checkout as version `name`; `version` is what it says of itself, None: its own."""
        form = _WITH_COPY if source == _HERE and version is None else _PROGRAM
        package = self.folder / name / "teimgr"
        shutil.copytree(source / "src" / "teimgr", package)  # with what is compiled: the times of the files are kept
        if version is not None:
            init = package / "__init__.py"
            init.write_text(init.read_text().replace(teimgr.__version__, version))
        program = self.folder / name / "program"
        program.write_text(form.format(python=sys.executable, path=str(package.parent), root=str(_HERE)))
        program.chmod(0o755)

    def use(self, name: str) -> None:
        """Have the link lead to an installed version."""
        link = self.folder / "next"
        link.symlink_to(self.folder / name / "program")
        link.replace(self.folder / "current")

    def _launch(self, environ: Mapping[str, str] | None) -> None:
        config = self.folder / "teimgr.toml"
        config.write_text(toml(self.settings))
        with (self.folder / "daemon.log").open("ab") as output:
            self.process = subprocess.Popen(
                [str(self.folder / "current"), "serve", "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"HF_HUB_OFFLINE": "1", SERVICE: nursery_service()},
                start_new_session=True,
            )


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Upgraded]:
    running = Upgraded(graceful_shutdown_timeout_secs=30)
    running.listen_limit_s = LIMIT_S
    running.install("old", Path(os.environ.get("UPGRADE_FROM", _HERE)))
    running.install("new", _HERE, _NEXT)
    running.use("old")
    with running:
        yield running


def workers(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("a").details["workers"]
    return found


def worker_version(daemon: DaemonProcess, port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/info", timeout=60) as reply:
        return str(json.loads(reply.read())["version"])


def mux_pid(daemon: DaemonProcess) -> int:
    return int(json.loads((daemon.folder / "run" / "mux-0.run").read_text())["pid"])


@pytest.mark.timeout(2 * LIMIT_S)  # the next version imports torch
def test_an_upgrade_under_load_loses_no_call(daemon: Upgraded, tmp_path: Path) -> None:
    build("bert", tmp_path)
    with daemon.client(timeout_s=LIMIT_S) as client:
        client.create("a", str(tmp_path), dtype="float32", replicas=2)
        client.wait_until_running("a", deadline_s=LIMIT_S)
        daemon.await_grpc()
        port, mux = client.get("a").port, mux_pid(daemon)
        before = {each["pid"] for each in workers(client)}
        with SteadyLoad(daemon, "a", port) as calls:
            daemon.use("new")
            told = client.restart_daemon()
            until(lambda: client.daemon()["pid"] == told["pid"], "the next daemon", LIMIT_S)
            assert client.daemon()["version"] == _NEXT
            until(
                lambda: [each["role"] for each in workers(client) if each["pid"] not in before] == ["serving"] * 2,
                "workers of the next version",
                LIMIT_S,
            )
            calls.progress(10, LIMIT_S)

        assert calls.failures == {}
        assert mux_pid(daemon) != mux
        # A worker of before may still take connections until it drains.
        until(lambda: worker_version(daemon, port) == _NEXT, "a worker of the next version", LIMIT_S)
        assert client.get("a").status == "running"
        assert client.health().details["alarms"] == []
