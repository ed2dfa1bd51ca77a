"""PID 1 of a container: a PID namespace whose first process is ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from teimgr.control.launch.process_handle import look_up
from tests.support.daemon_process import DaemonProcess
from tests.support.polling import until

_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--user", "--map-root-user", "--mount-proc"]
_CAN = subprocess.run([*_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0

pytestmark = pytest.mark.skipif(not _CAN, reason="this host allows no PID namespaces")

ORPHANS = """
import os, subprocess, sys, time
from pathlib import Path
from teimgr.daemon.parent import leave_pid_1
leave_pid_1()
for _ in range(3):  # each shell ends at once and leaves an orphan, which ends then
    subprocess.run(["sh", "-c", "sleep 0.05 & exit"], check=True)
end = time.monotonic() + 20
while (left := [p for p in Path("/proc").glob("[0-9]*/comm") if p.read_text() == "sleep\\n"]):
    assert time.monotonic() < end, [Path(p.parent, "stat").read_text().split()[2] for p in left]
    time.sleep(0.01)
"""
EXITS = "import os, sys\nfrom teimgr.daemon.parent import leave_pid_1\nleave_pid_1()\n{end}\n"
SIGNALLED = """
import signal, sys
from teimgr.daemon.parent import leave_pid_1
leave_pid_1()
got = []
def on_signal(number, frame):
    got.append(number)
    print("got", number, flush=True)
    if len(got) == 2:
        sys.exit(7)
if {handled}:
    signal.signal(signal.SIGTERM, on_signal)
print("ready", flush=True)
while True:
    signal.pause()
"""

# The successor takes the word and ends, while the first daemon answers a request.
FOLLOWED = """
import asyncio, sys
from teimgr.daemon.parent import leave_pid_1
from teimgr.daemon.succession import Succession
successor = (
    "import json, os, socket; link = socket.socket(fileno=int(os.environ['_TEIMGR_SUCCESSION_FD'])); link.recv(65536);"
    "link.send(json.dumps({'ready': {}}).encode()); link.recv(100); os._exit(9)"
)
leave_pid_1()
async def main():
    ready = asyncio.Event()
    succession = Succession({}, lambda follower: ready.set(), {}, command=[sys.executable, "-c", successor])
    await succession.begin()
    await ready.wait()
    if HAS_ORPHAN:
        await asyncio.create_subprocess_exec("sh", "-c", "sleep 600 & exit")
    succession.give_word()
    while open(f"/proc/{succession._child.pid}/stat").read().split()[2] != "Z":
        await asyncio.sleep(0.01)
    return succession.leave(0)
sys.exit(asyncio.run(main()))
"""


def first(script: str) -> subprocess.Popen[str]:
    """The script as PID 1 of a namespace."""
    return subprocess.Popen([*_NAMESPACE, sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def started() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    made: list[subprocess.Popen[str]] = []

    def start(script: str) -> subprocess.Popen[str]:
        made.append(first(script))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate()


def pid_1_of(namespace: int) -> int:
    """The child of `unshare`, by its pid out here."""
    return int(until(Path(f"/proc/{namespace}/task/{namespace}/children").read_text, "PID 1").split()[0])


def test_orphans_are_reaped(started: Callable[[str], subprocess.Popen[str]]) -> None:
    assert started(ORPHANS).wait(30) == 0


@pytest.mark.parametrize(
    ("end", "status"), [("sys.exit(3)", 3), ("", 0), ("os.kill(os.getpid(), 9)", 137), ("os.abort()", 134)]
)
def test_the_exit_status_is_that_of_the_daemon(
    started: Callable[[str], subprocess.Popen[str]], end: str, status: int
) -> None:
    assert started(EXITS.format(end=end)).wait(30) == status


@pytest.mark.parametrize("has_orphan", [False, True])
def test_the_status_of_a_successor_that_ends_before_its_predecessor(
    started: Callable[[str], subprocess.Popen[str]], has_orphan: bool
) -> None:
    """The first daemon had reaped it, and PID 1 waited for it for ever."""
    assert started(FOLLOWED.replace("HAS_ORPHAN", str(has_orphan))).wait(60) == 9


def test_each_signal_is_passed_on(started: Callable[[str], subprocess.Popen[str]]) -> None:
    process = started(SIGNALLED.format(handled=True))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(2):
        os.kill(pid_1_of(process.pid), signal.SIGTERM)
        assert process.stdout.readline() == f"got {signal.SIGTERM.value}\n"

    assert process.wait(30) == 7


def test_a_signal_before_there_is_a_handler_ends_it(started: Callable[[str], subprocess.Popen[str]]) -> None:
    process = started(SIGNALLED.format(handled=False))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(pid_1_of(process.pid), signal.SIGTERM)

    assert process.wait(30) == 128 + signal.SIGTERM


def test_pid_1_follows_a_daemon_to_its_successor_and_stops_it_in_order(tmp_path: Path) -> None:
    """`daemon.process` makes the namespace, and ends as its first process does."""
    daemon = DaemonProcess(grpc_enabled=False)
    daemon.within = _NAMESPACE
    (tmp_path / "torch.py").write_text("raise ImportError")  # three fork servers, of which nothing is asked
    with closing(daemon.start({"PYTHONPATH": str(tmp_path)})), daemon.client(timeout_s=120.0) as client:
        process = daemon.process
        assert process is not None
        pid_1 = pid_1_of(process.pid)
        for _ in range(2):
            first = client.daemon()["pid"]
            os.kill(pid_1, signal.SIGUSR2)
            until(lambda first=first: client.daemon()["pid"] != first, "another daemon", 120.0)
        log = daemon.folder / "daemon.log"
        before = len(log.read_text())
        os.kill(pid_1, signal.SIGTERM)

        assert process.wait(60) == 0
        assert '"message": "stopped"' in log.read_text()[before:]
        assert look_up(pid_1) is None
