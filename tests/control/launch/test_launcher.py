"""The local launcher and its nursery, with a scripted worker."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from tests.support.cgroups import memory_cgroup
from tests.support.daemon_process import free_ports
from tests.support.fakes.worker import fake_id
from tests.support.fleet import LIMIT_S, RESIDENT, local_launcher
from tests.support.polling import eventually

from teimgr.control.launch.control_link import identify
from teimgr.control.launch.launcher import FoundWorkers, LocalLauncher
from teimgr.control.launch.process_handle import (
    ExitReport,
    LaunchFailed,
    WorkerRunFile,
    boot_id,
    look_up,
)
from teimgr.errors import Code, InvalidConfig, PortConflict, Unavailable
from teimgr.spec import WorkerSpec

__all__ = ["memory_cgroup"]


def spec(flags: str = "", name: str = "a", **values: object) -> WorkerSpec:
    return WorkerSpec(name=name, model_id=fake_id(flags), **values)  # type: ignore[arg-type]


def left_over(folder: Path) -> set[str]:
    return {path.name for path in (folder / "run").iterdir()} - RESIDENT


async def test_a_launched_worker_answers_as_itself(launcher: LocalLauncher) -> None:
    handle = await launcher.launch(spec())

    status = await identify(handle.socket, LIMIT_S)

    assert status is not None
    assert (status.pid, status.incarnation, status.spec_hash) == (handle.pid, handle.incarnation, handle.spec.hash)
    await handle.stop(0)


async def test_a_worker_has_its_own_session_and_nothing_of_the_nurserys(launcher: LocalLauncher) -> None:
    handle = await launcher.launch(spec(nice=3))
    await identify(handle.socket, LIMIT_S)

    process = psutil.Process(handle.pid)
    descriptors = {path.name: str(path.readlink()) for path in Path(f"/proc/{handle.pid}/fd").iterdir()}
    log = str(launcher.log_path("a"))

    assert os.getsid(handle.pid) == handle.pid
    assert process.nice() == 3
    assert process.name() == "tei:a"
    assert (descriptors["0"], descriptors["1"], descriptors["2"]) == ("/dev/null", log, log)
    assert process.environ().keys() >= {"PATH"}
    assert not [target for target in descriptors.values() if "nursery" in target]
    await handle.stop(0)


async def test_an_exit_is_told_with_its_status_and_the_last_line_of_the_log(launcher: LocalLauncher) -> None:
    handle = await launcher.launch(spec("exit-at-once=7"))

    exit = await handle.wait()

    assert (exit.status, exit.report, exit.log_tail) == (7, None, "leaving at once")


async def test_an_exception_in_a_worker_is_status_1_with_a_traceback(launcher: LocalLauncher) -> None:
    exit = await (await launcher.launch(spec("raise"))).wait()

    assert (exit.status, exit.log_tail) == (1, "RuntimeError: asked to raise")


async def test_a_signal_is_told_as_a_negative_status(launcher: LocalLauncher) -> None:
    handle = await launcher.launch(spec())
    os.kill(handle.pid, signal.SIGKILL)

    assert (await handle.wait()).status == -signal.SIGKILL


async def test_an_exit_report_is_read_and_nothing_is_left(launcher: LocalLauncher, folder: Path) -> None:
    exit = await (await launcher.launch(spec("fail-permanent=11"))).wait()

    assert exit.report == ExitReport(Code.MODEL_NOT_FOUND, "scripted failure", permanent=True)
    assert left_over(folder) == set()


async def test_a_polite_worker_ends_within_the_grace(launcher: LocalLauncher) -> None:
    handle = await launcher.launch(spec())
    await identify(handle.socket, LIMIT_S)

    assert (await handle.stop(LIMIT_S)).status == 0


async def test_a_worker_that_ignores_the_terminate_signal_is_killed_when_the_grace_is_over(
    launcher: LocalLauncher, folder: Path
) -> None:
    handle = await launcher.launch(spec("ignore-term"))
    await identify(handle.socket, LIMIT_S)

    assert (await handle.stop(0.1)).status == -signal.SIGKILL
    assert left_over(folder) == set()


async def test_a_second_stop_with_less_grace_cuts_the_first_short(launcher: LocalLauncher) -> None:
    handle = await launcher.launch(spec("ignore-term"))
    await identify(handle.socket, LIMIT_S)
    patient = asyncio.create_task(handle.stop(LIMIT_S * 10))
    await asyncio.sleep(0)

    await handle.stop(0)

    assert (await patient).status == -signal.SIGKILL


@pytest.mark.parametrize("how", ["kill", "exit"])
async def test_what_a_worker_started_ends_with_it(launcher: LocalLauncher, folder: Path, how: str) -> None:
    handle = await launcher.launch(spec("grandchild"))
    await identify(handle.socket, LIMIT_S)
    grandchild = psutil.Process(int((folder / "run" / "grandchild").read_text()))

    await handle.stop(0 if how == "kill" else LIMIT_S)

    psutil.wait_procs([grandchild], timeout=LIMIT_S)
    assert not grandchild.is_running()


async def test_a_cancelled_launch_leaves_no_process(launcher: LocalLauncher, folder: Path) -> None:
    first = await launcher.launch(spec(name="first"))
    launching = asyncio.create_task(launcher.launch(spec()))
    await eventually(lambda: [path for path in (folder / "run").glob("*.sock") if path != first.socket])
    launching.cancel()

    with pytest.raises(asyncio.CancelledError):
        await launching

    await first.stop(0)
    assert left_over(folder) == set()


async def test_a_worker_whose_run_file_cannot_be_written_is_no_worker(
    launcher: LocalLauncher, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next daemon could not find it."""
    monkeypatch.setattr("teimgr.control.launch.launcher.new_incarnation", lambda: "0123456789ab")
    (folder / "run" / "0123456789ab.json.tmp").symlink_to(folder / "missing" / "file")

    with pytest.raises(LaunchFailed, match="cannot write the worker's run file"):
        await launcher.launch(spec())

    assert left_over(folder) == set()
    monkeypatch.undo()
    await (await launcher.launch(spec())).stop(0)


# Adoption


async def hand_over(old: LocalLauncher, folder: Path) -> LocalLauncher:
    """What a daemon's end without any clean-up leaves to the next one."""
    await old.close()
    new = local_launcher(folder)
    await new.start()
    return new


async def test_a_live_worker_is_adopted_with_its_status(launcher: LocalLauncher, folder: Path) -> None:
    handle = await launcher.launch(spec())
    await identify(handle.socket, LIMIT_S)
    new = await hand_over(launcher, folder)

    (adopted,) = await new.adopt((await new.find()).alive, lambda found: found == handle.spec)

    assert (adopted.handle.pid, adopted.status.state) == (handle.pid, "ready")
    assert abs(adopted.handle.started_at - handle.started_at) < 5
    assert (await adopted.handle.stop(LIMIT_S)).status is None
    assert left_over(folder) == set()
    await new.close()


async def test_an_unwanted_worker_is_ended(launcher: LocalLauncher, folder: Path) -> None:
    handle = await launcher.launch(spec())
    new = await hand_over(launcher, folder)

    assert await new.adopt((await new.find()).alive, lambda found: False) == []
    assert look_up(handle.pid) is None
    assert left_over(folder) == set()
    await new.close()


async def test_a_worker_that_does_not_answer_is_ended(
    launcher: LocalLauncher, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teimgr.control.launch.launcher.IDENTITY_LIMIT_S", 0.1)
    monkeypatch.setattr("teimgr.control.launch.launcher.LEFTOVER_GRACE_S", 0.1)
    handle = await launcher.launch(spec("deaf,ignore-term"))
    new = await hand_over(launcher, folder)

    assert await new.adopt((await new.find()).alive, lambda found: True) == []
    assert look_up(handle.pid) is None
    await new.close()


async def test_a_worker_without_a_run_file_is_ended(launcher: LocalLauncher, folder: Path) -> None:
    handle = await launcher.launch(spec())
    await identify(handle.socket, LIMIT_S)
    new = await hand_over(launcher, folder)
    for path in (folder / "run").glob(f"{handle.incarnation}.*"):
        path.unlink()

    assert await new.find() == FoundWorkers([], [])

    await eventually(lambda: look_up(handle.pid) is None)
    await new.close()


async def test_of_two_workers_of_one_name_one_is_kept(launcher: LocalLauncher, folder: Path) -> None:
    handles = [await launcher.launch(spec()) for _ in range(2)]
    await asyncio.gather(*(identify(handle.socket, LIMIT_S) for handle in handles))
    new = await hand_over(launcher, folder)

    (adopted,) = await new.adopt((await new.find()).alive, lambda found: True)

    await eventually(lambda: [look_up(handle.pid) for handle in handles].count(None) == 1)
    await adopted.handle.stop(0)
    await new.close()


async def test_what_the_dead_left_is_removed_and_nothing_else(launcher: LocalLauncher, folder: Path) -> None:
    run = folder / "run"
    ours = ["0123456789ab.sock", "0123456789ab.exit", "ba9876543210.json", "ba9876543210.json.tmp"]
    for name in [*ours, "mux-0.sock", "notes.json"]:
        (run / name).touch()
    me = look_up(os.getpid())
    assert me is not None
    stranger = WorkerRunFile(me.pid, me.start_time - 1, boot_id(), "x", "00000000000a", "a", "h", spec().to_json())
    stranger.write(run / "00000000000a.json")
    WorkerRunFile(me.pid, me.start_time, "another boot", "x", "00000000000b", "a", "h", "{}").write(
        run / "00000000000b.json"
    )

    assert await launcher.adopt((await launcher.find()).alive, lambda found: True) == []
    assert left_over(folder) == {"mux-0.sock", "notes.json"}


async def test_a_spec_of_another_version_is_never_adopted(launcher: LocalLauncher, folder: Path) -> None:
    handle = await launcher.launch(spec())
    await identify(handle.socket, LIMIT_S)
    file = folder / "run" / f"{handle.incarnation}.json"
    file.write_text(file.read_text().replace('\\"nice\\"', '\\"niceness\\"'))
    new = await hand_over(launcher, folder)

    assert await new.adopt((await new.find()).alive, lambda found: found.model_id != "") == []
    assert look_up(handle.pid) is None
    await new.close()


async def test_a_second_daemon_is_refused_the_run_directory(launcher: LocalLauncher, folder: Path) -> None:
    run = folder / "run"
    second, before = local_launcher(folder), {path.name for path in run.iterdir()}
    with pytest.raises(InvalidConfig, match="another daemon uses"):
        await second.start()
    await second.close()

    assert {path.name for path in run.iterdir()} == before >= {"nursery.run"}


async def test_a_run_directory_that_cannot_be_written_is_refused(folder: Path) -> None:
    (folder / "other" / "daemon.lock").mkdir(parents=True)
    (folder / "other").chmod(0o700)

    with pytest.raises(InvalidConfig, match=r"run_dir, log_dir: cannot write .*daemon\.lock: Is a directory"):
        await local_launcher(folder, run_dir=folder / "other").start()


async def test_a_run_directory_too_deep_for_a_socket_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="is too long for the path"):
        await local_launcher(folder, run_dir=folder / ("x" * 90)).start()


async def test_the_run_directory_is_for_its_owner_alone(launcher: LocalLauncher, folder: Path) -> None:
    handle = await launcher.launch(spec())

    assert (folder / "run").stat().st_mode & 0o777 == 0o700
    assert handle.socket.stat().st_mode & 0o777 == 0o600
    await handle.stop(0)


@pytest.mark.parametrize(
    ("mode", "content", "problem"),
    [
        (0o1777, None, "is a shared folder"),
        (0o755, "photo.jpg", "contains other files, such as photo.jpg"),
    ],
)
async def test_a_folder_that_is_not_ours_alone_is_refused_and_left_as_it_is(
    folder: Path, mode: int, content: str | None, problem: str
) -> None:
    run = folder / "run"
    run.mkdir()
    run.chmod(mode)
    if content:
        (run / content).touch()

    with pytest.raises(InvalidConfig, match=problem):
        await local_launcher(folder).start()

    assert run.stat().st_mode & 0o7777 == mode
    assert [path.name for path in run.iterdir()] == ([content] if content else [])


async def test_a_run_directory_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "run").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    with pytest.raises(InvalidConfig, match="belongs to another user"):
        await local_launcher(folder).start()


async def test_a_file_in_the_place_of_the_run_directory_is_refused(folder: Path) -> None:
    (folder / "run").touch()

    with pytest.raises(InvalidConfig, match="cannot be used"):
        await local_launcher(folder).start()


@pytest.mark.parametrize("names", [(), ("0123456789ab.json", "mux-0.run", "daemon.lock", "nursery.log.1")])
async def test_a_folder_with_nothing_but_our_files_becomes_private(folder: Path, names: tuple[str, ...]) -> None:
    run = folder / "run"
    run.mkdir(mode=0o755)
    for name in names:
        (run / name).touch()
    launcher = local_launcher(folder)

    await launcher.start()

    assert run.stat().st_mode & 0o777 == 0o700
    await launcher.close()


# Processes and logs


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Within the block, this process can open so many descriptors more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(count + 1)]
    for descriptor in free:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_worker_shares_the_port_that_the_daemon_has_joined(launcher: LocalLauncher) -> None:
    (port,) = free_ports(1)
    joined = await launcher.join_port("a", "127.0.0.1", port)
    sockets = {f"socket:[{os.fstat(sock.fileno()).st_ino}]" for sock in (joined.listener, *joined.queue.ends.values())}

    first, other = await launcher.launch(spec(port=port)), await launcher.launch(spec(name="b", port=port + 1))

    assert sockets <= sockets_of(first.pid)
    assert not sockets & sockets_of(other.pid)
    launcher.leave_port("a")
    launcher.leave_port("a")
    assert joined.listener.fileno() == -1
    with socket.create_connection(("127.0.0.1", port)):  # the worker has it
        pass
    await first.stop(0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    await other.stop(0)


async def test_a_port_of_another_process_is_not_joined(launcher: LocalLauncher) -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(PortConflict, match=f"Port {port}"):
        await launcher.join_port("a", "127.0.0.1", port)
    with pytest.raises(InvalidConfig, match=r"192\.0\.2\.1"):
        await launcher.join_port("a", "192.0.2.1", port)
    launcher.leave_port("a")


def sockets_of(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            found.add(str(path.readlink()))
    return found


async def test_a_descriptor_that_found_no_room_costs_a_launch_and_not_the_nursery(
    launcher: LocalLauncher, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teimgr.control.launch.nursery_link.FORK_LIMIT_S", 2)
    await (await launcher.launch(spec())).stop(0)
    nursery = launcher.nursery.pid

    with descriptors_left(2), pytest.raises(LaunchFailed, match="too many open files"):  # the log and the socket
        await launcher.launch(spec())

    await eventually(lambda: left_over(folder) == set())
    assert launcher.nursery.pid == nursery
    await (await launcher.launch(spec())).stop(0)


async def test_without_descriptors_no_trace_of_a_live_worker_is_removed(launcher: LocalLauncher, folder: Path) -> None:
    handles = [await launcher.launch(spec(name=name)) for name in "ab"]
    traces = left_over(folder)

    for left in range(3):
        with descriptors_left(left), pytest.raises(Unavailable, match="Too many open files"):
            await launcher.find()

    assert left_over(folder) == traces
    with descriptors_left(0), pytest.raises(OSError, match="Too many open files"):
        WorkerRunFile.read(folder / "run" / f"{handles[0].incarnation}.json")
    assert WorkerRunFile.read(folder / "run" / "absent.json") is None
    for handle in handles:
        await handle.stop(0)


async def test_a_worker_that_a_real_cgroup_has_killed_says_so(launcher: LocalLauncher, memory_cgroup: Path) -> None:
    await launcher.nursery.ready()
    (memory_cgroup / "cgroup.procs").write_text(str(launcher.nursery.pid))
    killed = await launcher.launch(WorkerSpec(name="a", model_id=fake_id("large=400")))
    exit = await killed.wait()
    by_hand = await launcher.launch(WorkerSpec(name="a", model_id=fake_id("")))
    by_hand.send_signal(signal.SIGKILL)
    plain = await by_hand.wait()

    assert exit.report is not None
    assert exit.report.code is Code.KILLED_FOR_MEMORY
    head, _, held = exit.report.message.rpartition(" held ")
    assert head == "killed by the kernel for memory: the cgroup allows 256 MiB, the worker"
    assert 150 <= int(held.removesuffix(" MiB (KILLED_FOR_MEMORY)")) <= 256
    assert (plain.status, plain.report) == (-signal.SIGKILL, None)
