"""The link to the fork server: its start, its death at any moment, its end."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.fakes.worker import fake_id
from tests.support.fleet import LIMIT_S, RESIDENT, children, local_launcher
from tests.support.polling import eventually

from teimgr.control.launch.control_link import identify
from teimgr.control.launch.launcher import LocalLauncher
from teimgr.control.launch.process_handle import LaunchFailed, look_up
from teimgr.control.ledger.system_memory import MemoryKills
from teimgr.spec import WorkerSpec


def spec(flags: str = "", name: str = "a", **values: object) -> WorkerSpec:
    return WorkerSpec(name=name, model_id=fake_id(flags), **values)  # type: ignore[arg-type]


def left_over(folder: Path) -> set[str]:
    return {path.name for path in (folder / "run").iterdir()} - RESIDENT


async def test_the_nursery_makes_many_workers_at_once(launcher: LocalLauncher, folder: Path) -> None:
    handles = await asyncio.gather(*(launcher.launch(spec(name=f"n{number}")) for number in range(12)))
    identities = await asyncio.gather(*(identify(handle.socket, LIMIT_S) for handle in handles))

    assert [status.pid for status in identities if status] == [handle.pid for handle in handles]
    await asyncio.gather(*(handle.stop(0) for handle in handles))
    assert left_over(folder) == set()


async def test_a_dead_nursery_is_replaced_and_its_workers_live_on(launcher: LocalLauncher) -> None:
    before = await launcher.launch(spec(name="before"))
    old = launcher.nursery.pid
    assert old is not None
    os.kill(old, signal.SIGKILL)

    after = await launcher.launch(spec(name="after"))

    assert launcher.nursery.pid not in (None, old)
    assert await identify(before.socket, LIMIT_S) is not None
    assert (await before.stop(0)).status is None, "its parent is gone, nobody can tell"
    assert (await after.stop(0)).status == -signal.SIGKILL


async def test_a_nursery_that_cannot_import_its_entry_fails_the_launch_with_its_last_line(folder: Path) -> None:
    launcher = local_launcher(folder, entry="no.such.module:main")
    await launcher.start()

    with pytest.raises(LaunchFailed, match="No module named 'no'"):
        await launcher.launch(spec())

    assert left_over(folder) == set()
    await launcher.close()


async def test_a_nursery_that_the_kernel_kills_for_memory_fails_the_launch_with_that_cause(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "killed by the kernel for memory: the cgroup allows 208 MiB"
    monkeypatch.setattr(MemoryKills, "explain", lambda *_: told)
    launcher = local_launcher(folder)
    await launcher.start()
    launching = asyncio.create_task(launcher.launch(spec()))
    await asyncio.sleep(0)
    assert launcher.nursery.pid is not None
    os.kill(launcher.nursery.pid, signal.SIGKILL)

    with pytest.raises(LaunchFailed, match=f"the workers' fork server was {told}"):
        await launching
    await launcher.close()


async def test_a_nursery_that_cannot_be_made_fails_the_launch_until_it_can(folder: Path) -> None:
    launcher = local_launcher(folder)
    obstacle = folder / "run" / "nursery.log"
    obstacle.mkdir(parents=True)
    await launcher.start()

    with pytest.raises(LaunchFailed, match="cannot start the nursery"):
        await launcher.launch(spec())

    obstacle.rmdir()
    await (await launcher.launch(spec())).stop(0)
    await launcher.close()


async def test_a_nursery_that_dies_and_cannot_be_replaced_fails_the_launch(folder: Path) -> None:
    launcher = local_launcher(folder)
    await launcher.start()
    await launcher.nursery.ready()
    await eventually(lambda: launcher.nursery.standby_pid)
    log, pids = folder / "run" / "nursery.log", (launcher.nursery.pid, launcher.nursery.standby_pid)
    log.unlink()
    log.mkdir()
    for pid in pids:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    await eventually(lambda: launcher.nursery.pid is None)

    with pytest.raises(LaunchFailed, match="cannot start the nursery"):
        await launcher.launch(spec())
    await launcher.close()


async def test_no_descriptors_left_fail_the_launch_and_leak_no_nursery(folder: Path) -> None:
    launcher = local_launcher(folder)
    (folder / "run").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    try:
        for spare in range(16):  # each step of making a nursery fails once for want of a descriptor
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, hard))
            try:
                launcher.nursery.start()
            except LaunchFailed:
                continue
            break
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await launcher.nursery.close()

    assert spare > 0
    assert not children()


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_nursery_that_dies_in_the_middle_of_a_fork_leaves_no_second_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its run file is written `after` or not; the launch succeeds with the next nursery, under another name."""
    mark = folder / "mark"
    monkeypatch.setenv("MORTAL", moment)
    monkeypatch.setenv("MORTAL_MARK", str(mark))
    launcher = local_launcher(folder, preload=("tests.control.launch.fakes.mortal",))
    await launcher.start()

    handle = await launcher.launch(spec())

    await eventually(lambda: look_up(int(mark.read_text())) is None)
    assert {path.stem for path in (folder / "run").glob("*.sock")} == {handle.incarnation}
    assert await identify(handle.socket, LIMIT_S) is not None
    await handle.stop(0)
    assert left_over(folder) == set()
    await launcher.close()


async def test_a_stopped_nursery_does_not_keep_the_daemon_from_ending(launcher: LocalLauncher, folder: Path) -> None:
    await (await launcher.launch(spec())).stop(0)
    pid = launcher.nursery.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    launching = asyncio.create_task(launcher.launch(spec()))
    await eventually(lambda: list((folder / "run").glob("*.sock")))

    async with asyncio.timeout(LIMIT_S / 2):
        launching.cancel()
        await asyncio.wait({launching})
        await launcher.close()

    assert launching.cancelled()
    assert look_up(pid) is None
    assert left_over(folder) == set()


async def bare_nursery(folder: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A nursery that is ready, and its control socket, as its daemon has them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    options = [str(theirs.fileno()), "--entry", "tests.support.fakes.worker:main", "--preload", ""]
    with theirs, (folder / "log").open("wb") as output:
        command = [sys.executable, "-P", "-m", "teimgr.control.launch.nursery", *options]
        nursery = await asyncio.to_thread(
            subprocess.Popen, command, stdout=output, stderr=output, pass_fds=[theirs.fileno()]
        )
    assert b"threads" in await asyncio.to_thread(ours.recv, 1 << 16)
    return nursery, ours


async def test_a_request_in_the_queue_of_a_stalled_nursery_dies_with_its_daemon(folder: Path) -> None:
    """The next daemon may have ended its adoption before the nursery runs again."""
    run = folder / "run"
    run.mkdir(mode=0o700)
    nursery, ours = await bare_nursery(folder)
    nursery.send_signal(signal.SIGSTOP)
    request = {"id": 1, "incarnation": "0123456789ab", "run_dir": str(run), "spec": spec().to_json(), "ports": []}
    with socket.socket(socket.AF_UNIX) as listener, (folder / "log").open("ab") as output:
        listener.bind(str(run / "0123456789ab.sock"))
        listener.listen()
        socket.send_fds(ours, [json.dumps(request).encode()], [listener.fileno(), output.fileno()])

    ours.close()
    nursery.send_signal(signal.SIGCONT)

    assert await asyncio.to_thread(nursery.wait, LIMIT_S) == 0
    assert not (run / "0123456789ab.json").exists()
    from teimgr.control.launch.process_handle import unrecorded_workers

    assert unrecorded_workers(run, ()) == []


async def test_the_nursery_of_an_earlier_daemon_is_killed(launcher: LocalLauncher, folder: Path) -> None:
    await launcher.nursery.ready()
    pid = launcher.nursery.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    launcher._lock = os.close(launcher._lock or -1)  # as at the end of its process

    new = local_launcher(folder)
    await new.start()

    await eventually(lambda: look_up(pid) is None)
    await new.close()


async def test_a_missing_module_of_the_preload_does_not_stop_the_nursery(folder: Path) -> None:
    launcher = local_launcher(folder, preload=("no_such_module",))
    await launcher.start()

    handle = await launcher.launch(spec())

    await handle.stop(0)
    await launcher.close()


async def test_a_nursery_with_several_threads_starts_its_workers_afresh(folder: Path) -> None:
    launcher = local_launcher(folder, preload=("tests.control.launch.fakes.threaded",))
    await launcher.start()

    handle = await launcher.launch(spec(api_key="a-secret-key"))
    assert launcher.nursery.standby_pid is None, "its workers would import again as well"
    status = await identify(handle.socket, LIMIT_S)

    assert status is not None
    assert (status.pid, status.spec_hash) == (handle.pid, handle.spec.hash)
    command = Path(f"/proc/{handle.pid}/cmdline").read_bytes()
    assert b"-c" in command.split(b"\0")
    assert b"a-secret-key" not in command + Path(f"/proc/{handle.pid}/environ").read_bytes()
    await handle.stop(0)
    await launcher.close()


# The standby


class Counted:
    """A launcher whose nursery counts its imports."""

    def __init__(self, folder: Path) -> None:
        self.launcher = local_launcher(folder, preload=("tests.control.launch.fakes.counted",))
        self._count = folder / "count"

    @property
    def imports(self) -> int:
        return len(self._count.read_text().splitlines())

    async def standby(self, *, other_than: int | None = None) -> int:
        """The pid of the standby."""
        await eventually(lambda: self.launcher.nursery.standby_pid not in (None, other_than))
        assert self.launcher.nursery.standby_pid is not None
        return self.launcher.nursery.standby_pid

    def kill(self, *pids: int | None) -> None:
        for pid in pids:
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    async def works(self) -> None:
        """A worker can be forked, and its exit status is reported."""
        handle = await self.launcher.launch(spec())
        assert await identify(handle.socket, LIMIT_S) is not None
        assert (await handle.stop(0)).status == -signal.SIGKILL


@pytest.fixture
async def counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Counted]:
    monkeypatch.setenv("COUNTED", str(folder / "count"))
    made = Counted(folder)
    await made.launcher.start()
    yield made
    await made.launcher.close()
    assert not children()
    assert left_over(folder) == set()


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def test_the_standby_takes_the_place_of_a_dead_nursery_without_an_import(counted: Counted) -> None:
    nursery, standby = counted.launcher.nursery.pid, await counted.standby()
    assert nursery is not None

    for _ in range(3):
        counted.kill(nursery)
        await eventually(lambda standby=standby: counted.launcher.nursery.pid == standby)
        await counted.works()
        nursery, standby = standby, await counted.standby(other_than=standby)

    await eventually(lambda: (comm(nursery), comm(standby)) == ("teimgr-nursery", "teimgr-standby"))
    assert counted.imports == 1


async def test_a_nursery_killed_in_the_same_moment_as_a_launch_costs_no_import(counted: Counted) -> None:
    await counted.standby()

    counted.kill(counted.launcher.nursery.pid)
    await counted.works()

    assert counted.imports == 1


async def test_a_dead_nursery_and_a_dead_standby_cost_one_import(counted: Counted) -> None:
    counted.kill(counted.launcher.nursery.pid, await counted.standby())

    await counted.works()
    await counted.standby()

    assert counted.imports == 2


async def test_a_dead_standby_is_replaced(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teimgr.control.launch.nursery_link._STANDBY_PAUSE_S", 0.1)
    nursery, standby = counted.launcher.nursery.pid, await counted.standby()

    counted.kill(standby)

    assert await counted.standby(other_than=standby) != standby
    assert counted.launcher.nursery.pid == nursery
    assert counted.imports == 1


async def test_a_stopped_standby_is_given_up_when_it_is_needed(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teimgr.control.launch.nursery_link.STANDBY_LIMIT_S", 0.2)
    standby = await counted.standby()
    os.kill(standby, signal.SIGSTOP)

    counted.kill(counted.launcher.nursery.pid)
    await counted.works()

    assert look_up(standby) is None
    assert counted.imports == 2


async def test_a_stopped_standby_ends_with_its_link(counted: Counted) -> None:
    nursery, standby = counted.launcher.nursery.pid, await counted.standby()
    assert nursery is not None
    os.kill(standby, signal.SIGSTOP)

    await counted.launcher.close()

    assert (look_up(nursery), look_up(standby)) == (None, None)


async def test_the_standby_of_an_earlier_daemon_is_killed(counted: Counted, folder: Path) -> None:
    standby = await counted.standby()
    os.kill(standby, signal.SIGSTOP)
    counted.launcher._lock = os.close(counted.launcher._lock or -1)  # as at the end of its process

    new = local_launcher(folder)
    await new.start()

    await eventually(lambda: look_up(standby) is None)
    await new.close()


async def test_a_standby_holds_no_descriptor_of_its_nursery(counted: Counted) -> None:
    """Else the end of the nursery's socket would not be seen, nor that of a worker's listener."""
    handle = await counted.launcher.launch(spec())
    first = await counted.standby()
    counted.kill(first)
    standby = await counted.standby(other_than=first)

    def held() -> list[str]:
        try:
            found = {int(path.name): str(path.readlink()) for path in Path(f"/proc/{standby}/fd").iterdir()}
        except FileNotFoundError:  # it is closing them
            return []
        return sorted(name.partition(":")[0] for number, name in found.items() if number > 2)

    await eventually(lambda: comm(standby) == "teimgr-standby" and held() == ["anon_inode", "socket"])
    await handle.stop(0)


@pytest.mark.parametrize("serves", [False, True])
async def test_a_standby_ends_with_its_daemon(folder: Path, serves: bool) -> None:
    """Its sockets close with the daemon; also where the standby is the nursery by then."""
    nursery, ours = await bare_nursery(folder)
    link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(ours, [b'{"id": 1, "standby": true}'], [theirs.fileno()])
        _, (pidfd,), _, _ = await asyncio.to_thread(socket.recv_fds, ours, 1 << 16, 1)
    assert b"threads" in await asyncio.to_thread(link.recv, 1 << 16)
    if serves:
        nursery.kill()
    assert not select.select([pidfd], [], [], 0.05)[0]

    ours.close()
    link.close()

    assert await asyncio.to_thread(select.select, [pidfd], [], [], LIMIT_S) == ([pidfd], [], [])
    await asyncio.to_thread(nursery.wait, LIMIT_S)
    os.close(pidfd)
