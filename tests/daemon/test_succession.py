"""A daemon that is replaced by its successor while clients call: nothing is refused, nothing is lost."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from teimgr.client import Client
from teimgr.daemon.parent import LINK
from teimgr.daemon.succession import Follower, Succession
from teimgr.errors import Unavailable, UpdateFailed
from teimgr.spec import State
from tests.end_to_end.rolling_load import SteadyLoad
from tests.support.daemon_process import DaemonProcess, WarmDaemonProcess, free_ports, toml
from tests.support.models import build
from tests.support.polling import eventually, until

LIMIT_S = 120.0
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    build("bert", folder)
    return folder


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    yield from started(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """For tests that leave it without instances."""
    yield from started(tmp_path_factory.mktemp("shared"))


def started(folder: Path) -> Iterator[DaemonProcess]:
    running = WarmDaemonProcess(api_socket=str(folder / "api.sock"))
    running.is_new = True  # its command starts the next one
    with running:
        yield running


@dataclass
class Polls:
    """REST asked all the time, on a connection that is kept and on new ones, until the block ends."""

    port: int
    answers: list[int] = field(default_factory=list)
    """The pids that answered."""
    failures: list[str] = field(default_factory=list)

    def __enter__(self) -> Polls:
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._poll, args=(kept,)) for kept in (True, False)]
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for each in self._threads:
            each.join(60)
            assert not each.is_alive()

    def _poll(self, is_kept: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while not self._ends.wait(0.03):
            try:
                connection.request("GET", "/daemon")
                reply = connection.getresponse()
                self.answers.append(json.loads(reply.read())["pid"])
                if reply.getheader("connection") == "close":
                    self.failures.append("the connection was closed")
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.failures.append(f"{'kept' if is_kept else 'new'}: {error!r}")
                connection.close()
            if not is_kept:
                connection.close()
        connection.close()


def processes(daemon: DaemonProcess) -> dict[str, int]:
    """The pids of the worker and of the mux, which a restart leaves as they are."""
    with daemon.client() as client:
        worker = client.get("a").pid
    assert worker is not None
    return {"worker": worker, "mux": pid_in(daemon.folder / "run" / "mux-0.run")}


def pid_in(run_file: Path) -> int:
    return int(json.loads(run_file.read_text())["pid"])


def pid(daemon: DaemonProcess, socket: str | None = None) -> int:
    with Client(socket or daemon.api, daemon.grpc) as client:
        return int(client.daemon()["pid"])


def test_calls_meet_no_gap_and_workers_and_muxes_are_those_of_before(daemon: DaemonProcess, model: Path) -> None:
    with daemon.client() as client:
        client.create("a", str(model), dtype="float32")
        client.wait_until_running("a", deadline_s=LIMIT_S)
        port = client.get("a").port
    before, first = processes(daemon), pid(daemon)
    assert daemon.process is not None
    assert first == daemon.process.pid

    pids = [first]
    with SteadyLoad(daemon, "a", port) as calls, Polls(daemon.api_port) as polls:
        for _ in range(2):  # the second one has a parent already
            os.kill(daemon.process.pid, signal.SIGUSR2)
            until(lambda: polls.answers and polls.answers[-1] not in pids, "another daemon", LIMIT_S)
            pids.append(polls.answers[-1])
            calls.progress(10)

    assert polls.failures == []
    assert calls.failures == {}
    assert [*dict.fromkeys(polls.answers)] == pids, "each daemon answers, and then never again"
    assert processes(daemon) == before
    assert pid(daemon, f"unix:{daemon.settings['api_socket']}") == pids[-1]
    with daemon.client() as client:
        assert client.get("a").restarts == 0
    assert daemon.is_running, "the pid that was started is still there"
    assert psutil.Process(daemon.process.pid).memory_info().rss < 32 << 20
    until(lambda: not psutil.pid_exists(pids[1]), "the end of the second daemon")
    assert daemon.stop() == 0
    until(lambda: daemon.processes() == [], "the end of all", LIMIT_S)


def test_calls_that_wait_for_a_model_on_demand_lose_nothing(shared: DaemonProcess, model: Path) -> None:
    """They failed with "the daemon is ending", while the worker loaded on and the next daemon adopted it."""
    daemon = shared
    with daemon.client() as client, ThreadPoolExecutor(2) as pool:
        client.create("a", str(model), dtype="float32", load="on_demand")
        first = pid(daemon)
        by_grpc = pool.submit(lambda: client.embed(["rain"], instance="a"))
        by_http = pool.submit(post, daemon, {"model": "a", "input": "rain"})
        until(lambda: client.get("a").pid, "the worker", LIMIT_S)
        worker = client.get("a").pid
        assert worker is not None
        os.kill(worker, signal.SIGSTOP)  # a load that takes longer than the restart
        try:
            assert client.get("a").status is State.STARTING
            os.kill(first, signal.SIGUSR2)
            status, headers = by_http.result(LIMIT_S)
            assert status == 503
            assert int(headers["retry-after"]) > 0
            until(lambda: pid(daemon) != first, "another daemon", LIMIT_S)
            assert not by_grpc.done()
        finally:
            os.kill(worker, signal.SIGCONT)
        assert len(by_grpc.result(LIMIT_S)) == 1
        assert client.get("a").pid == worker
        client.delete("a")


def post(daemon: DaemonProcess, body: dict[str, str]) -> tuple[int, dict[str, str]]:
    """The status and the headers of an answer to `/v1/embeddings`."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.api_port, timeout=LIMIT_S)
    connection.request("POST", "/v1/embeddings", json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status, {name.lower(): value for name, value in reply.getheaders()}


def test_the_command_waits_for_the_next_daemon_and_names_both(shared: DaemonProcess) -> None:
    first = pid(shared)
    done = subprocess.run(
        [sys.executable, "-m", "teimgr", "daemon", "restart", "--url", shared.api, "--json"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert (told["before"]["pid"], told["now"]["pid"]) == (first, pid(shared))
    assert '"POST", "path": "/daemon/restart"' in shared.log().replace('method": ', "")


def test_one_that_does_not_start_changes_nothing_and_says_why(shared: DaemonProcess) -> None:
    daemon, config = shared, shared.folder / "teimgr.toml"
    good, first = config.read_text(), pid(daemon)
    with daemon.client() as client, ExitStack() as stack:
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        for content, reason in (
            (good.replace(f"grpc_port = {daemon.grpc_port}", f"grpc_port = {taken}"), f"{taken} already in use"),
            (good + "\nno_such_key = 1\n", "no_such_key"),
            (good.replace("state.toml", "other.toml"), "and not find the running workers. Stop the daemon"),
        ):
            config.write_text(content)
            with pytest.raises(UpdateFailed, match=reason):
                client.restart_daemon()
            assert pid(daemon) == first
            assert any("restart of the daemon failed" in each for each in client.health().details["alarms"])
        config.write_text(good)
        second = client.restart_daemon()["pid"]
    until(lambda: pid(daemon) == second, "the next daemon", LIMIT_S)


def test_one_that_fails_after_the_word_leaves_worker_and_mux_to_the_daemon_after_it(
    daemon: DaemonProcess, model: Path
) -> None:
    """It stopped them on its way out, and the command reported success."""
    daemon.await_grpc()
    config, log = daemon.folder / "teimgr.toml", daemon.folder / "daemon.log"
    good, first, free = config.read_text(), pid(daemon), free_ports(1)[0]
    with daemon.client() as client, ThreadPoolExecutor(2) as pool:
        for name in ("a", "held"):
            client.create(name, str(model), dtype="float32")
            client.wait_until_running(name, deadline_s=LIMIT_S)
        before, held = processes(daemon), client.get("held").pid
        assert held is not None
        config.write_text(good.replace(f"grpc_port = {daemon.grpc_port}", f"grpc_port = {free}"))
        os.kill(held, signal.SIGSTOP)  # its deletion takes seconds, which the word waits for
        pool.submit(client.delete, "held")
        until(lambda: client.get("held").status is State.STOPPING, "the deletion")
        command = [sys.executable, "-m", "teimgr", "daemon", "restart", "--url", daemon.api, "--timeout", "30"]
        restart = pool.submit(subprocess.run, command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        until(lambda: "is ready and takes over" in log.read_text(), "a successor", LIMIT_S)
        with socket.create_server(("127.0.0.1", free)):
            done = restart.result(LIMIT_S)
            until(lambda: not daemon.is_running, "the end of the daemons", LIMIT_S)
        assert done.returncode != 0, done.stdout
        assert f"cannot start: Port {free} already in use" in log.read_text()
        assert not psutil.pid_exists(first)
        config.write_text(good)
        daemon.start()
        client.wait_until_running("a", deadline_s=LIMIT_S)
    assert processes(daemon) == before


def test_a_stop_while_the_next_one_starts_stops_both(daemon: DaemonProcess) -> None:
    assert daemon.process is not None
    os.kill(daemon.process.pid, signal.SIGUSR2)
    until(lambda: "the next daemon is being started" in (daemon.folder / "daemon.log").read_text())
    assert daemon.stop() == 0
    until(lambda: daemon.processes() == [], "the end of all", LIMIT_S)


@pytest.mark.parametrize("is_ready", [False, True])
async def test_a_stop_is_kept_also_where_the_next_one_gets_ready_at_that_moment(is_ready: bool) -> None:
    """It got the word and served on, after a stop that was answered."""
    successor = """
import json, os, socket
link = socket.socket(fileno=int(os.environ["_TEIMGR_SUCCESSION_FD"]))
link.recv(65536)
if IS_READY:
    link.send(json.dumps({"ready": {}}).encode())
link.recv(100)
""".replace("IS_READY", str(is_ready))
    took_over: list[Follower] = []
    succession = Succession({}, took_over.append, {}, command=[sys.executable, "-c", successor])
    beginning = asyncio.create_task(succession.begin())
    await eventually(lambda: succession._control is not None)
    assert succession._control is not None
    if is_ready:  # its message is there, and is not read yet
        select.select([succession._control], [], [], LIMIT_S)

    succession.refuse()

    with pytest.raises(asyncio.CancelledError):
        await beginning
    assert took_over == []
    assert not succession.is_taking_over
    with pytest.raises(Unavailable):
        await succession.begin()


def test_a_second_restart_while_the_mux_is_being_replaced_meets_no_gap(daemon: DaemonProcess, model: Path) -> None:
    """The former mux was ended before the one that follows it listened: connections to gRPC were refused."""
    config, run_file, log = (daemon.folder / each for each in ("teimgr.toml", "run/mux-0.run", "daemon.log"))
    with daemon.client() as client:
        client.create("a", str(model), dtype="float32")
        client.wait_until_running("a", deadline_s=LIMIT_S)
        port = client.get("a").port
    first, former = pid(daemon), processes(daemon)["mux"]
    config.write_text(toml(daemon.settings | {"grpc_max_parallel_streams": 99}))
    with SteadyLoad(daemon, "a", port) as calls:
        os.kill(first, signal.SIGUSR2)
        until(lambda: pid_in(run_file) != former, "the next mux", LIMIT_S)
        os.kill(following := pid_in(run_file), signal.SIGSTOP)  # a start that takes its time
        second = pid(daemon)
        os.kill(second, signal.SIGUSR2)
        until(lambda: log.read_text().count("is ready and takes over") == 2, "another daemon", LIMIT_S)
        calls.progress(10)
        os.kill(following, signal.SIGCONT)
        until(lambda: pid(daemon) not in (first, second), "the third daemon", LIMIT_S)
        until(lambda: not psutil.pid_exists(former), "the end of the former mux", LIMIT_S)
        calls.progress(10)
    assert calls.failures == {}
    assert processes(daemon)["mux"] == following


def test_a_reload_before_the_word_is_the_next_daemons_once_it_serves(daemon: DaemonProcess, model: Path) -> None:
    """It planned against a fleet that was not read yet: all failed with "already exists", and an alarm stayed."""
    config, first = daemon.folder / "teimgr.toml", pid(daemon)
    seeds = [{"name": "a", "model_id": str(model), "dtype": "float32", "tags": {"new": "yes"}}]
    with daemon.client() as client, ThreadPoolExecutor(1) as pool:
        for name in ("a", "held"):
            client.create(name, str(model), dtype="float32")
            client.wait_until_running(name, deadline_s=LIMIT_S)
        held = client.get("held").pid
        assert held is not None
        os.kill(held, signal.SIGSTOP)  # its deletion takes seconds, which the word waits for
        deletion = pool.submit(client.delete, "held")
        until(lambda: client.get("held").status is State.STOPPING, "the deletion")
        os.kill(first, signal.SIGUSR2)
        until(
            lambda: "is ready and takes over" in (daemon.folder / "daemon.log").read_text(),
            "a successor",
            LIMIT_S,
        )
        config.write_text(toml(daemon.settings | {"instances": seeds}))
        os.kill(first, signal.SIGHUP)
        until(lambda: pid(daemon) != first, "the next daemon", LIMIT_S)
        deletion.result(LIMIT_S)
        until(lambda: client.get("a").tags == {"new": "yes"}, "the reload", LIMIT_S)
        assert not any("reload" in each for each in client.health().details.get("alarms", []))


def test_the_next_daemon_reloads_too_what_changed_after_it_had_read_it(shared: DaemonProcess) -> None:
    daemon, first, log = shared, pid(shared), shared.folder / "daemon.log"
    starts = log.read_text().count("daemon starts")
    os.kill(first, signal.SIGUSR2)
    until(
        lambda: log.read_text().count("daemon starts") > starts, "a successor that has read the configuration", LIMIT_S
    )
    (daemon.folder / "teimgr.toml").write_text(toml(daemon.settings | {"log_level": "debug"}))
    os.kill(first, signal.SIGHUP)
    until(lambda: pid(daemon) != first, "the next daemon", LIMIT_S)
    with daemon.client() as client:
        until(lambda: not client.reload(dry_run=True)["plan"]["settings"], "its reload", 30)


def test_where_the_parent_is_killed_the_daemon_ends_as_by_kill_9(daemon: DaemonProcess, model: Path) -> None:
    with daemon.client() as client:
        client.create("a", str(model), dtype="float32")
        client.wait_until_running("a", deadline_s=LIMIT_S)
        before, second = processes(daemon), client.restart_daemon()["pid"]
        until(lambda: pid(daemon) == second, "the next daemon", LIMIT_S)
        assert daemon.process is not None
        until(lambda: psutil.Process(daemon.process.pid).cmdline()[2:4] == ["-m", "teimgr.daemon.parent"], "a parent")
        daemon.kill()
        until(lambda: not psutil.pid_exists(second), "the end of the daemon")
        daemon.start()
        client.wait_until_running("a", deadline_s=LIMIT_S)
    assert processes(daemon) == before


LIVES = f"""
import asyncio, os, signal, socket, sys
from contextlib import suppress
from pathlib import Path
from teimgr.daemon.succession import Predecessor, Succession

async def main():
    if (predecessor := Predecessor.from_environment()) is not None:
        await predecessor.word({{}})
        return 0
    lives = Path(sys.argv[1])
    with lives.open("a") as file:
        print(os.getpid(), os.environ.get({LINK!r}), file=file)
    if len(lives.read_text().splitlines()) == 2:
        with suppress(ChildProcessError):
            return bool(os.waitpid(-1, os.WNOHANG))  # a child that is left
        return 7
    succession = Succession({{}}, lambda follower: None, {{}})
    follower = await succession.begin()
    os.kill(follower.pid, signal.SIGSTOP)
    given = [succession.give_word()] if sys.argv[2:] == ["unread"] else []
    os.kill(follower.pid, signal.SIGKILL)
    os.waitid(os.P_PID, follower.pid, os.WEXITED | os.WNOWAIT)
    kept, passed = socket.socketpair()
    succession.pass_on(passed)
    assert (given or [succession.give_word()]) == ([follower.pid] if given else [None])
    async with asyncio.timeout(10):
        await succession.all_passed_on(60)
    return succession.leave(0)

sys.exit(asyncio.run(main()))
"""


@pytest.mark.parametrize("has_parent", [False, True], ids=["alone", "with a parent"])
@pytest.mark.parametrize("word", ["not sent", "unread"])
def test_where_the_next_one_dies_before_it_has_the_word_the_old_one_starts_again_in_its_place(
    tmp_path: Path, has_parent: bool, word: str
) -> None:
    """Both were gone, and workers and muxes without a daemon."""
    script, lives = tmp_path / "daemon.py", tmp_path / "lives"
    script.write_text(LIVES)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        number = str(theirs.fileno())
        environ = os.environ | ({LINK: number} if has_parent else {})
        command = [sys.executable, str(script), str(lives), word]
        with subprocess.Popen(command, env=environ, pass_fds=[theirs.fileno()]) as process:
            assert process.wait(LIMIT_S) == 7
        link = number if has_parent else None
        assert lives.read_text().splitlines() == [f"{process.pid} {link}"] * 2
        ours.setblocking(False)
        if has_parent and word == "unread":
            ours.recv(64)
            assert ours.recv(64).decode() == str(process.pid), "the one that serves again"
        with pytest.raises(BlockingIOError):  # its parent was not given the pid of one that is gone
            ours.recv(64)


def test_systemd_learns_the_next_process_which_is_then_the_one_that_notifies(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(LIMIT_S)
        with closing(WarmDaemonProcess()) as daemon:
            daemon.start({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "600000000"})
            assert received(systemd, "READY=1")
            with daemon.client() as client:
                second = client.restart_daemon()["pid"]
            assert f"MAINPID={second}" in received(systemd, "MAINPID=")
            assert received(systemd, "READY=1"), "of the next one: the former one sends nothing more"
            assert daemon.process is not None
            assert daemon.process.wait(LIMIT_S) == 0
            os.kill(second, signal.SIGTERM)
            assert received(systemd, "STOPPING=1")
            until(lambda: daemon.processes() == [], "the end of all", LIMIT_S)


def received(systemd: socket.socket, what: str) -> list[str]:
    """The first notification that has this; none but those of the watchdog come before it."""
    while True:
        found = systemd.recv(4096).decode().split("\n")
        if any(each.startswith(what) for each in found):
            return found
        assert found == ["WATCHDOG=1"], found
