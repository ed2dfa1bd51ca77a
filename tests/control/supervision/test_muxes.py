"""Mux supervision: restarts and alarms with a scripted mux; adoption and surplus with real ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.frame_worker import FrameWorker, hold, lengths
from tests.support.mux_process import client, embed, running, stub
from tests.support.polling import eventually

from teimgr.config.settings import Settings
from teimgr.control.launch.control_link import MuxLink, MuxLost
from teimgr.control.launch.mux_launcher import LocalMux, LocalMuxLauncher, MuxLauncher, MuxRunFile, mux_config
from teimgr.control.launch.process_handle import Exit, LaunchFailed, ProcessHandle, look_up
from teimgr.control.supervision import muxes as module
from teimgr.control.supervision.crash_reports import CrashReports
from teimgr.control.supervision.lifecycle import Backoff, Exited, Observation, ProbeFailed, ProbeOk
from teimgr.control.supervision.muxes import MUX_POLICY, Muxes, MuxSupervisor, MuxTimeouts
from teimgr.errors import PortConflict, Unavailable
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import RouteEntry, State
from teimgr.wire.routing.directory import Directory

LIMIT_S = 60.0
FAKE = str(Path(__file__).with_name("fake_mux.py"))


class Heeded(MuxSupervisor):
    """A mux supervisor with a semaphore for each kind of event: an answer, one that is late, the end of a process."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.heard, self.missed, self.lost = (asyncio.Semaphore(0) for _ in range(3))

    def _record(self, event: Observation) -> None:
        super()._record(event)
        semaphores = {ProbeOk: self.heard, ProbeFailed: self.missed, Exited: self.lost}
        if kind := semaphores.get(type(event)):
            kind.release()


class Kept:
    """Supervises a scripted mux, with short timeouts."""

    def __init__(self, settings: Settings, how: str, answer_limit_s: float = LIMIT_S) -> None:
        self.metrics = DaemonMetrics()
        self.directory = Directory()
        command = (sys.executable, FAKE, how)
        launcher = LocalMuxLauncher(0, mux_config(0, settings), settings.log_dir, 1 << 20, 1, command)
        self.supervisor = Heeded(
            launcher,
            self.directory,
            self.metrics,
            CrashReports(settings.log_dir / "crashes"),
            # Only a mux that never answers may have the time run out.
            timeouts=MuxTimeouts(
                connect_limit_s=0.1 if how == "absent" else LIMIT_S,
                answer_limit_s=0.02 if how == "mute" else answer_limit_s,
                interval_s=0.05,
            ),
            restarts=replace(
                MUX_POLICY,
                max_probe_failures=5 if how == "mute" else 1000,
                backoff=Backoff(first_s=0.01, max_s=0.02, stable_after_s=LIMIT_S),
            ),
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.supervisor.run())
        try:
            async with asyncio.timeout(LIMIT_S):
                yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.supervisor.stop(0)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("crash", "the mux exited with status 7"),
        ("absent", "cannot connect to its control socket"),
        ("mute", "5 health probes in a row failed: mux-0 has given no answer for 0.02 s"),
        ("garbage", "cannot read its reply"),
        ("list", "cannot read its reply: not a JSON object"),
        ("flood", "cannot read its reply"),
        ("hangup", "control connection"),
    ],
)
async def test_a_mux_that_cannot_be_used_is_started_again_and_again(settings: Settings, how: str, why: str) -> None:
    kept = Kept(settings, how)
    async with kept.running() as task:
        for _ in range(3):
            await kept.supervisor.lost.acquire()

        assert not task.done()
        assert kept.supervisor.alarm is not None
        assert why in kept.supervisor.alarm
    assert [path.name for path in settings.run_dir.iterdir() if path.name.startswith("mux")] == []


async def test_a_mux_that_does_not_die_gets_a_successor(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    undead: list[LocalMux] = []

    async def stop(self: LocalMux, grace_s: float, *, sigterm: bool = True) -> Exit:
        undead.append(self)
        raise LaunchFailed("it does not die")

    kept = Kept(settings, "garbage")
    with monkeypatch.context() as patched:
        patched.setattr(LocalMux, "stop", stop)
        async with kept.running():
            for _ in range(2):
                await kept.supervisor.lost.acquire()
            assert len({process.pid for process in undead}) == 2
    for process in undead:
        await process.stop(0)


async def test_counters_of_many_instances_are_no_reason_to_kill_a_mux(settings: Settings) -> None:
    kept = Kept(settings, "large")
    async with kept.running():
        for _ in range(2):
            await kept.supervisor.heard.acquire()

        assert kept.supervisor.alarm is None
        assert kept.supervisor.lost.locked()


async def test_a_mux_whose_connection_breaks_is_connected_again_and_not_restarted(settings: Settings) -> None:
    kept = Kept(settings, "reset")
    async with kept.running():
        for number in range(3):
            await kept.supervisor.heard.acquire()
            kept.directory.publish(RouteEntry(f"i{number}", "model", State.STOPPED))

        assert kept.supervisor.alarm is None
        assert kept.supervisor.lost.locked()


async def test_a_mux_that_is_killed_is_back_and_the_alarm_goes(settings: Settings) -> None:
    kept = Kept(settings, "good")
    async with kept.running():
        await kept.supervisor.heard.acquire()
        first = MuxRunFile.read(settings.run_dir / "mux-0.run")
        assert first is not None
        assert kept.supervisor.alarm is None
        kept.supervisor._process.send_signal(signal.SIGKILL)  # type: ignore[union-attr]

        await kept.supervisor.lost.acquire()
        assert kept.supervisor.alarm is not None
        kept.supervisor.heard = asyncio.Semaphore(0)
        await kept.supervisor.heard.acquire()

        assert kept.supervisor.alarm is None
        second = MuxRunFile.read(settings.run_dir / "mux-0.run")
        assert second is not None
        assert second.pid != first.pid
        (report,) = (settings.log_dir / "crashes").glob("_mux-0-*.json")
        facts = json.loads(report.read_text())
        assert (facts["pid"], facts["signal"]) == (first.pid, "SIGKILL")
        assert facts["reason"] == "the mux was killed by SIGKILL"


async def test_a_mux_that_hangs_is_an_alarm_until_it_answers_again(settings: Settings) -> None:
    kept = Kept(settings, "good", answer_limit_s=0.05)
    async with kept.running():
        await kept.supervisor.heard.acquire()
        process = kept.supervisor._process
        assert process is not None

        kept.supervisor.missed = asyncio.Semaphore(0)
        process.send_signal(signal.SIGSTOP)
        await kept.supervisor.missed.acquire()
        assert kept.supervisor.alarm == "mux-0 has given no answer for 0.05 s"
        kept.supervisor.heard = asyncio.Semaphore(0)
        process.send_signal(signal.SIGCONT)
        await kept.supervisor.heard.acquire()

        assert kept.supervisor.alarm is None
        assert kept.supervisor._process is process, "it was given the time"


def test_a_mux_that_hangs_is_replaced_soon() -> None:
    timeouts = MuxTimeouts()

    assert timeouts.interval_s + MUX_POLICY.max_probe_failures * timeouts.answer_limit_s <= 15


async def test_a_folder_that_cannot_be_written_is_an_alarm_and_not_the_end(settings: Settings) -> None:
    kept = Kept(settings, "good")
    in_the_way = settings.run_dir / "mux-0.config"
    in_the_way.mkdir()
    async with kept.running() as task:
        for _ in range(2):
            await kept.supervisor.lost.acquire()
        assert not task.done()
        assert kept.supervisor.alarm is not None
        assert "Is a directory" in kept.supervisor.alarm
        in_the_way.rmdir()

        await kept.supervisor.heard.acquire()

        assert kept.supervisor.alarm is None


async def test_a_defect_of_ours_is_an_alarm_and_not_the_end(settings: Settings) -> None:
    kept = Kept(settings, "good")
    fine, kept.metrics.mux_stats = kept.metrics.mux_stats, None  # type: ignore[assignment,method-assign]
    async with kept.running() as task:
        await kept.supervisor.lost.acquire()
        assert not task.done()
        assert "TypeError" in (kept.supervisor.alarm or "")
        kept.metrics.mux_stats = fine  # type: ignore[method-assign]

        await kept.supervisor.heard.acquire()


async def test_every_change_of_the_directory_is_pushed_and_acknowledged(settings: Settings) -> None:
    kept = Kept(settings, "good")
    async with kept.running():
        await kept.supervisor.heard.acquire()
        for number in range(3):
            kept.directory.publish(RouteEntry(f"i{number}", "model", State.STOPPED))
            await kept.supervisor.heard.acquire()


async def test_routes_are_confirmed_by_a_mux_that_has_them_and_by_the_end_of_one_that_does_not_answer(
    settings: Settings,
) -> None:
    for how in ("good", "mute"):
        kept = Kept(settings, how)
        await kept.supervisor.routes_confirmed()  # there is no process
        async with kept.running():
            await (kept.supervisor.heard if how == "good" else kept.supervisor.lost).acquire()
            kept.directory.publish(RouteEntry("a", "model", State.STOPPED))
            await kept.supervisor.routes_confirmed()
            assert kept.supervisor._routes in (kept.directory.version, None)


# Real muxes


class Counted(DaemonMetrics):
    """Metrics that keep which muxes sent figures."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: list[str] = []
        self.heard: dict[str, asyncio.Event] = {f"mux-{number}": asyncio.Event() for number in range(3)}

    def mux_stats(self, mux: str, figures: object) -> None:
        super().mux_stats(mux, figures)  # type: ignore[arg-type]
        self.heard[mux].set()

    def mux_gone(self, mux: str) -> None:
        super().mux_gone(mux)
        self.gone.append(mux)


crashed: list[Muxes] = []


@pytest.fixture(autouse=True)
def reaped() -> Iterator[None]:
    """What a crashed daemon started is still this process's child."""
    yield
    for supervisor in [supervisor for muxes in crashed for supervisor in muxes._supervisors]:
        assert isinstance(supervisor._process, LocalMux)
        child = supervisor._process._child
        assert child is not None
        child.kill()
        child.wait(LIMIT_S)
    crashed.clear()


async def fed(settings: Settings, stop: bool) -> list[int]:
    """The process numbers of the muxes of a daemon that has fed them all once, and then crashes or stops."""
    metrics = Counted()
    muxes = Muxes(settings, Directory(), metrics)
    if not stop:
        crashed.append(muxes)
    async with asyncio.timeout(LIMIT_S), muxes.running():
        for number in range(settings.mux_processes if settings.grpc_enabled else 0):
            await metrics.heard[f"mux-{number}"].wait()
        found = pids(settings)
        assert muxes.alarms() == []
    if stop:
        await muxes.stop(0)
    return found


def pids(settings: Settings) -> list[int]:
    """Of those that live and have a run file."""
    files = [MuxRunFile.read(path) for path in sorted(settings.run_dir.glob("mux-*.run"))]
    return [found.pid for found in files if found and look_up(found.pid) == found.process]


async def test_the_next_daemon_adopts_them_and_a_stop_ends_them(settings: Settings) -> None:
    settings = replace(settings, mux_processes=2)

    first = await fed(settings, stop=False)
    second = await fed(settings, stop=True)

    assert len(first) == 2
    assert second == first
    assert pids(settings) == []


async def test_one_that_died_is_started_beside_those_that_listen(settings: Settings) -> None:
    settings = replace(settings, mux_processes=2)
    first = await fed(settings, stop=False)
    found = MuxRunFile.read(settings.run_dir / "mux-1.run")
    assert found is not None
    process = ProcessHandle.adopt(found)
    assert process is not None
    process.send_signal(signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        await process.wait()

    second = await fed(settings, stop=True)

    assert second[0] == first[0]
    assert second[1] != first[1]


@pytest.mark.parametrize("wanted", [{"mux_processes": 2}, {"mux_processes": 1}, {"grpc_enabled": False}])
async def test_those_that_are_too_many_are_ended(settings: Settings, wanted: dict[str, int]) -> None:
    first = await fed(replace(settings, mux_processes=3), stop=False)
    fewer = replace(settings, **wanted)  # type: ignore[arg-type]

    second = await fed(fewer, stop=True)

    assert len(first) == 3
    assert len(second) == (fewer.mux_processes if fewer.grpc_enabled else 0)
    assert pids(settings) == []


class OnHost(LocalMuxLauncher):
    """The mux of host `b`, in one of the places that there are for it and its successor."""

    host = "b"

    def __init__(self, settings: Settings, place: int, how: str) -> None:
        command = (sys.executable, FAKE, how)
        super().__init__(place, mux_config(place, settings), settings.log_dir, 1 << 20, 1, command)
        self.name = "b/mux-0"
        self.run_dir = settings.run_dir

    async def adopt(self) -> LocalMux | None:
        for path in self.run_dir.glob("mux-*.run"):
            found = MuxRunFile.read(path)
            if found is not None and (pidfd := found.open_pidfd()) is not None:
                return LocalMux(found.pid, pidfd, None, path.with_suffix(".sock"), self.log_path, 0, 0.0, True)
        return None


class Hosts:
    """Which muxes there shall be, as a test says."""

    def __init__(self) -> None:
        self.muxes: dict[str, MuxLauncher] = {}
        self._changed = asyncio.Event()

    def have(self, *launchers: MuxLauncher) -> None:
        self.muxes = {each.name: each for each in launchers}
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def wanted(self) -> dict[str, MuxLauncher]:
        return self.muxes

    async def changed(self) -> None:
        await self._changed.wait()

    async def end_surplus(self) -> None:
        """There are none."""


async def test_a_host_that_comes_back_has_a_mux_while_its_former_one_ends(settings: Settings) -> None:
    settings = replace(settings, grpc_enabled=False)  # no mux of its own
    hosts, metrics = Hosts(), Counted()
    metrics.heard["b/mux-0"] = asyncio.Event()
    muxes = Muxes(settings, Directory(), metrics, hosts=hosts)
    async with asyncio.timeout(LIMIT_S), muxes.running():
        hosts.have(OnHost(settings, 0, "busy"))
        await eventually(lambda: muxes.states() == {"b": "serving"})
        (former,) = pids(settings)
        hosts.have()
        await eventually(lambda: muxes.states() == {"b": "leaving"})

        hosts.have(OnHost(settings, 1, "good"))
        await eventually(lambda: muxes.states() == {"b": "serving"})
        successor = {*pids(settings)} - {former}
        assert len(successor) == 1
        assert former in pids(settings)

        os.kill(former, signal.SIGKILL)
        await eventually(lambda: {*pids(settings)} == successor and muxes.alarms() == [])
        assert muxes.states() == {"b": "serving"}
        assert metrics.gone == []
    await muxes.stop(0)
    assert pids(settings) == []
    assert metrics.gone == []


async def test_hosts_are_followed_on_after_an_error_that_is_not_expected(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ADOPTION_PAUSE_S", 0.01)
    hosts = Hosts()
    good, hosts.muxes = hosts.muxes, cast(Any, None)
    muxes = Muxes(replace(settings, grpc_enabled=False), Directory(), DaemonMetrics(), hosts=hosts)
    async with asyncio.timeout(LIMIT_S), muxes.running():
        await eventually(lambda: any("not supervised: AttributeError" in each for each in muxes.alarms()))
        hosts.muxes = good
        await eventually(lambda: muxes.alarms() == [])


async def test_a_mux_that_is_terminated_finishes_its_calls_beside_its_successor(settings: Settings) -> None:
    worker = FrameWorker(settings.run_dir / "worker.sock", "incarnation", hold)
    await worker.listen()
    directory, metrics = Directory(), Counted()
    directory.publish(running("a", worker))
    muxes = Muxes(settings, directory, metrics)
    async with asyncio.timeout(LIMIT_S), muxes.running(), client({"port": settings.grpc_port}) as channel:
        await metrics.heard["mux-0"].wait()
        call = stub(channel, "Embed")(embed("x"))
        request = await worker.requests.get()
        (pid,) = pids(settings)

        os.kill(pid, signal.SIGTERM)

        await eventually(lambda: pids(settings) not in ([], [pid]))
        async with client({"port": settings.grpc_port}) as other:
            new = stub(other, "Embed")(embed("xx"), wait_for_ready=True)
            lengths(await worker.requests.get())
            assert list((await new).embeddings) == [2.0]
        lengths(request)
        assert list((await call).embeddings) == [1.0]
        await eventually(lambda: look_up(pid) is None)
    await muxes.stop(0)
    worker.drop()


async def test_an_adopted_mux_of_another_configuration_is_replaced_while_it_serves(settings: Settings) -> None:
    (first,) = await fed(settings, stop=False)
    worker = FrameWorker(settings.run_dir / "worker.sock", "incarnation", lengths)
    await worker.listen()
    directory = Directory()
    directory.publish(running("a", worker))
    other = replace(settings, grpc_request_timeout_secs=settings.grpc_request_timeout_secs + 1)
    muxes = Muxes(other, directory, DaemonMetrics())
    answers = 0
    async with asyncio.timeout(LIMIT_S), muxes.running(), client({"port": settings.grpc_port}) as channel:
        await eventually(lambda: muxes.states() == {"": "serving"})
        replacing = asyncio.create_task(muxes.replaced())
        while not replacing.done() or look_up(first) is not None:
            answers += [*(await stub(channel, "Embed")(embed("xx"))).embeddings] == [2.0]
            async with client({"port": settings.grpc_port}) as another:
                answers += [*(await stub(another, "Embed")(embed("xx"))).embeddings] == [2.0]
        await eventually(lambda: muxes.states() == {"": "serving"})
        (second,) = pids(other)
        assert second != first
        assert answers > 2
    await muxes.stop(0)
    worker.drop()


async def test_one_whose_successor_does_not_start_serves_on_with_an_alarm(settings: Settings) -> None:
    (first,) = await fed(settings, stop=False)
    (settings.run_dir / "mux-0.config").unlink()
    (settings.run_dir / "mux-0.config").mkdir()
    other = replace(settings, grpc_request_timeout_secs=settings.grpc_request_timeout_secs + 1)
    muxes = Muxes(other, Directory(), DaemonMetrics())
    async with asyncio.timeout(LIMIT_S), muxes.running():
        await muxes.replaced()
        await eventually(lambda: any("its successor did not start" in each for each in muxes.alarms()))
        assert pids(other) == [first]
        (settings.run_dir / "mux-0.config").rmdir()
    await muxes.stop(0)
    assert pids(other) == []


async def test_one_whose_successor_fails_can_be_connected_to_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its control socket was removed for the successor: a broken link, or the next daemon, ended it with a gap."""
    (first,) = await fed(settings, stop=False)

    async def give(supervisor: MuxSupervisor, process: Any) -> None:
        raise MuxLost("as if it did not listen")

    monkeypatch.setattr(MuxSupervisor, "_give_routes", give)
    other = replace(settings, grpc_request_timeout_secs=settings.grpc_request_timeout_secs + 1)
    muxes = Muxes(other, Directory(), DaemonMetrics())
    async with asyncio.timeout(LIMIT_S), muxes.running():
        await muxes.replaced()
        await eventually(lambda: any("its successor did not start" in each for each in muxes.alarms()))
        link = await MuxLink.open(str(settings.run_dir / "mux-0.sock"), LIMIT_S)
        assert (await link.ask("stats"))["pid"] == first
        link.close()
    await muxes.stop(0)


async def test_an_older_mux_that_refuses_the_rules_serves_until_its_successor_does(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed at once, and calls were refused until another one had started."""
    launcher = LocalMuxLauncher(
        0, mux_config(0, settings), settings.log_dir, 1 << 20, 1, (sys.executable, FAKE, "hangup")
    )
    old, given = await launcher.launch(), list[bool]()
    kept = Kept(replace(settings, grpc_request_timeout_secs=settings.grpc_request_timeout_secs + 1), "good")
    give_routes = MuxSupervisor._give_routes

    async def give(supervisor: MuxSupervisor, process: Any) -> None:
        await give_routes(supervisor, process)
        given.append(look_up(old.pid) is not None)

    monkeypatch.setattr(MuxSupervisor, "_give_routes", give)
    assert await kept.supervisor.adopt()
    async with kept.running():
        await old.wait()
        await kept.supervisor.heard.acquire()
        await eventually(lambda: kept.supervisor.state == "serving")
    assert given == [True]  # the old one was there


class Counting:
    """A registry of one tenant that notes the use which muxes report."""

    is_on = True

    def __init__(self) -> None:
        self.counted: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    def terms(self) -> list[list[int]]:
        return [[1, 1, 0, 0, 0]]

    def count(self, *what: Any) -> None:
        self.counted.put_nowait(what)


async def test_the_last_calls_of_a_mux_of_another_host_are_counted(settings: Settings) -> None:
    """Its link ended when it began to stop: what its last calls used was lost, and their quotas were refused."""
    tenants = Counting()
    launcher = OnHost(settings, 0, "leaves")
    crashes = CrashReports(settings.log_dir / "crashes")
    supervisor = MuxSupervisor(launcher, Directory(), DaemonMetrics(), crashes, tenants=cast(Any, tenants))
    task = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(LIMIT_S):
        assert await tenants.counted.get() == (1, "a", "model-a", [7, 1, 1, 0, 0])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await supervisor.stop(0)


async def test_a_daemon_that_ends_while_it_starts_a_successor_leaves_the_mux(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on another host, where that takes a while: its task ended with an error of ours."""
    (first,) = await fed(settings, stop=False)
    launching = asyncio.Event()

    async def launch(launcher: LocalMuxLauncher, *, beside: bool = False) -> LocalMux:
        launching.set()
        await asyncio.Event().wait()
        raise AssertionError

    other = replace(settings, grpc_request_timeout_secs=settings.grpc_request_timeout_secs + 1)
    launcher = LocalMuxLauncher(0, mux_config(0, other), other.log_dir, 1 << 20, 1)
    supervisor = MuxSupervisor(launcher, Directory(), DaemonMetrics(), CrashReports(other.log_dir / "crashes"))
    monkeypatch.setattr(LocalMuxLauncher, "launch", launch)
    assert await supervisor.adopt()
    task = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(LIMIT_S):
        await launching.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert pids(other) == [first]
    await supervisor.stop(0)
    assert pids(other) == []


@pytest.mark.clause("M3.1-port-taken")
async def test_a_stranger_on_the_port_is_said_at_once(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", settings.grpc_port)), pytest.raises(PortConflict):
        async with Muxes(settings, Directory(), DaemonMetrics()).running():
            pass


async def test_a_unix_socket_is_the_first_muxs_and_one_that_is_used_is_a_conflict(settings: Settings) -> None:
    path = settings.run_dir / "grpc.sock"
    settings = replace(settings, grpc_socket=path, mux_processes=2)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(path))
        stranger.listen()
        with pytest.raises(PortConflict, match=rf"Socket {path} already in use by process \d+; .+ `grpc_socket`"):
            async with Muxes(settings, Directory(), DaemonMetrics()).running():
                pass

    assert [mux_config(number, settings).socket for number in range(2)] == [str(path), ""]

    muxes = Muxes(settings, Directory(), DaemonMetrics())
    async with asyncio.timeout(LIMIT_S), muxes.running():
        await eventually(lambda: path.exists() and not listens_no_more(path))
        found = MuxRunFile.read(settings.run_dir / "mux-0.run")
        assert found is not None
        os.kill(found.pid, signal.SIGKILL)
        await eventually(lambda: listens_no_more(path))
        await eventually(lambda: not listens_no_more(path))  # of its successor
        found = MuxRunFile.read(settings.run_dir / "mux-0.run")
        assert found is not None
        os.kill(found.pid, signal.SIGKILL)
    await muxes.stop(0)
    assert not path.exists()


def listens_no_more(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) != 0


async def test_the_log_of_a_running_mux_is_rotated_and_private(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teimgr.observability.logs.CHECK_INTERVAL_S", 0.01)
    muxes = Muxes(replace(settings, log_max_bytes=4096), Directory(), DaemonMetrics())
    log = settings.log_dir / "_mux-0.log"
    try:
        async with muxes.running():
            await eventually(log.exists)
            with log.open("a") as file:
                file.write("x" * 5000 + "\n")
            await eventually(log.with_name("_mux-0.log.1").exists)
            assert {path.stat().st_mode & 0o007 for path in settings.log_dir.glob("_mux-0.log*")} == {0}
    finally:
        await muxes.stop(0)


async def test_a_run_file_that_cannot_be_read_now_is_no_missing_one(settings: Settings) -> None:
    (settings.run_dir / "mux-0.run").mkdir(parents=True)  # any error but that there is none
    with pytest.raises(Unavailable, match="Is a directory"):
        async with Muxes(settings, Directory(), DaemonMetrics()).running():
            pass
