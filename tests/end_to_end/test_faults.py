"""Things are killed, and the fleet heals: nobody else notices, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.end_to_end.load import Load
from tests.support.daemon_process import MINILM, DaemonProcess, WarmDaemonProcess
from tests.support.models import build
from tests.support.polling import until

from teimgr.errors import NotRunning, TeimgrError
from teimgr.spec import State

HEAL_LIMIT_S = 10.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    build("bert", folder)
    return folder


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    with WarmDaemonProcess(orphan_grace_secs=30) as running:
        yield running


@pytest.fixture
def daemon(shared: DaemonProcess, tiny: Path) -> DaemonProcess:
    """The daemon of this file with both instances running: `mini` is the real model, `tiny` another one."""
    with shared.client() as client:
        there = {instance.name for instance in client.list()}
        if "mini" not in there:
            client.create("mini", MINILM, dtype="float32")
        if "tiny" not in there:
            client.create("tiny", str(tiny))
        for name in ("mini", "tiny"):
            if client.get(name).status is State.STOPPED:
                client.start(name)
            client.wait_until_running(name, deadline_s=60)
    return shared


def pid_of(daemon: DaemonProcess, name: str) -> int:
    with daemon.client() as client:
        pid = client.get(name).pid
    assert pid is not None
    return pid


def test_a_killed_worker_is_back_and_its_neighbour_lost_nothing(daemon: DaemonProcess) -> None:
    with Load(daemon, "mini") as victim, Load(daemon, "tiny") as neighbour:
        victim.progress(20)
        neighbour.progress(20)
        before = pid_of(daemon, "mini")
        os.kill(before, signal.SIGKILL)
        with daemon.client() as client:
            after = wait_for_other_pid(client, "mini", before)
        victim.progress(20)
        neighbour.progress(20)

    assert after != before
    assert set(victim.failures) <= {"BACKEND_UNAVAILABLE"}
    assert victim.failures.total() >= 1
    assert neighbour.failures == {}
    with daemon.client() as client:
        assert client.get("mini").restarts == 1


def test_a_killed_daemon_costs_no_call_and_the_next_one_adopts(daemon: DaemonProcess) -> None:
    workers = {name: pid_of(daemon, name) for name in ("mini", "tiny")}
    with Load(daemon, "mini") as load:
        load.progress(20)
        daemon.kill()
        load.progress(40)
        daemon.start()
        with daemon.client() as client:
            for name in workers:
                client.wait_until_running(name, deadline_s=HEAL_LIMIT_S)
            assert client.embed("known to the new one too", instance="tiny").shape[0] == 1
        load.progress(20)

    assert load.failures == {}
    assert {name: pid_of(daemon, name) for name in workers} == workers


def test_a_killed_mux_is_back(daemon: DaemonProcess) -> None:
    mux = next(process for process in daemon.processes() if "teimgr.mux.process" in process.cmdline())
    mux.kill()
    mux.wait(10)

    with Load(daemon, "mini") as load:
        load.progress(10)


def test_a_killed_nursery_is_back_for_the_next_start(daemon: DaemonProcess, tiny: Path) -> None:
    before = pid_of(daemon, "mini")
    nursery = psutil.Process(json.loads((daemon.folder / "run" / "nursery.run").read_text())["pid"])
    nursery.kill()
    nursery.wait(10)

    with daemon.client() as client:
        client.create("later", str(tiny))
        client.wait_until_running("later", deadline_s=60)
        client.delete("later")
    assert pid_of(daemon, "mini") == before


def test_stop_start_restart_and_delete_under_load_leave_nothing(daemon: DaemonProcess) -> None:
    with daemon.client() as client, Load(daemon, "tiny") as load, Load(daemon, "mini") as neighbour:
        load.progress(20)
        assert client.stop("tiny").status is State.STOPPED
        with pytest.raises(NotRunning):
            client.stop("tiny")
        client.start("tiny")
        client.wait_until_running("tiny", deadline_s=HEAL_LIMIT_S)
        load.progress(20)
        client.restart("tiny")
        client.wait_until_running("tiny", deadline_s=HEAL_LIMIT_S)
        load.progress(20)
        port = client.get("tiny").port
        client.delete("tiny")
        assert [instance.name for instance in client.list()] == ["mini"]
        neighbour.progress(5)

    assert set(load.failures) <= {"BACKEND_UNAVAILABLE", "INSTANCE_NOT_FOUND"}
    assert neighbour.failures == {}
    workers = [process for process in daemon.processes() if is_worker_of(process, "tiny")]
    assert workers == []
    assert port not in listening_ports(daemon)
    assert len([name for name in daemon.run_files() if name.endswith(".sock") and not name.startswith("mux")]) == 1


@pytest.mark.clause("M4-configuration-only")
def test_a_stop_is_wanted_state_and_survives_the_daemon(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        client.stop("tiny")
    daemon.kill()
    daemon.start()

    with daemon.client() as client:
        client.wait_until_running("mini", deadline_s=HEAL_LIMIT_S)
        assert client.get("tiny").status is State.STOPPED
        with pytest.raises(TeimgrError, match="stopped"):
            client.embed("anybody there?", instance="tiny")


@pytest.mark.clause("M5.5-shutdown")
def test_a_clean_stop_leaves_no_process_no_socket_and_no_run_file(tiny: Path) -> None:
    with DaemonProcess() as daemon:  # with a nursery of its own
        with daemon.client() as client:
            client.create("tiny", str(tiny), replicas=2)
            client.wait_until_running("tiny", deadline_s=60)
        everything = daemon.processes()
        assert len(everything) >= 4  # two workers, the mux, the nursery

        assert daemon.stop() == 0

        psutil.wait_procs(everything, timeout=5)
        assert daemon.processes() == []
        assert [name for name in daemon.run_files() if name.endswith((".sock", ".json", ".exit", ".run"))] == []


@pytest.mark.clause("M5.5-shutdown")
def test_a_second_signal_ends_the_daemon_without_grace() -> None:
    with WarmDaemonProcess(graceful_shutdown_timeout_secs=3600) as daemon:
        assert daemon.process is not None
        mux = until(lambda: next((each for each in daemon.processes() if "teimgr.mux" in str(each.cmdline())), None))
        until((daemon.folder / "run" / "mux-0.sock").exists)
        mux.suspend()  # it will not end by itself
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: '"message": "stopping"' in daemon.log(), "the stop")
        assert daemon.is_running

        assert daemon.stop() == 0

        assert psutil.wait_procs([mux], timeout=5)[1] == []


def test_a_daemon_that_is_refused_the_run_directory_leaves_the_others_muxes() -> None:
    """It had ended what it had never started: socket and run files, without which the next daemon adopts no mux."""
    with WarmDaemonProcess() as daemon:
        until((daemon.folder / "run" / "mux-0.sock").exists)
        before = daemon.run_files()
        second = WarmDaemonProcess(run_dir=str(daemon.folder / "run"))

        with pytest.raises(AssertionError):
            second.start()

        assert "run_dir: another daemon uses" in second.log()
        assert daemon.run_files() == before
        assert {"mux-0.run", "mux-0.sock", "mux-0.config", "nursery.run"} <= set(before)


def test_workers_without_a_daemon_end_when_the_grace_is_over(tiny: Path) -> None:
    with WarmDaemonProcess(orphan_grace_secs=1) as daemon:
        with daemon.client() as client:
            client.create("tiny", str(tiny))
            client.wait_until_running("tiny", deadline_s=60)
        orphans = daemon.processes()
        daemon.kill()

        gone, alive = psutil.wait_procs(orphans, timeout=15)

        assert alive == []
        assert gone


def wait_for_other_pid(client: object, name: str, before: int) -> int:
    """The pid of the next running worker of `name`."""

    def other_pid() -> int:
        instance = client.get(name)  # type: ignore[attr-defined]
        return instance.pid if instance.status is State.RUNNING and instance.pid not in (None, before) else 0

    return until(other_pid, f"{name} running again", HEAL_LIMIT_S)


def is_worker_of(process: psutil.Process, name: str) -> bool:
    return any(file.path.endswith(f"/{name}.log") for file in process.open_files())


def listening_ports(daemon: DaemonProcess) -> set[int]:
    return {
        connection.laddr.port
        for process in daemon.processes()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
