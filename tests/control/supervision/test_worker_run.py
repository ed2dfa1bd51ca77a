"""One worker's life over a launcher in memory: what a real process cannot be made to do."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.fleet import LIMIT_S

from teimgr.control.launch.control_link import ControlLink
from teimgr.control.launch.launcher import Adopted
from teimgr.control.launch.process_handle import Exit, ExitReport, LaunchFailed
from teimgr.control.supervision.lifecycle import Exited, LoadBegan, Observation
from teimgr.control.supervision.worker_run import ProbePlan, Prober, WorkerRun
from teimgr.errors import Code, InvalidGpuId, TeimgrError, Unavailable
from teimgr.spec import CpuThreads, WorkerSpec
from teimgr.wire.frames import Method

SPEC = WorkerSpec(name="a", model_id="m")


class Handle:
    """A process that ends when the test ends it; `immortal`: not by `stop`."""

    def __init__(self, *, immortal: bool = False) -> None:
        self.spec = SPEC
        self.incarnation = "0123456789ab"
        self.pid = 1
        self.socket = Path("/nonexistent/socket")
        self.started_at = 0.0
        self.immortal = immortal
        self.stops: list[float] = []
        self.signals: list[signal.Signals] = []
        self.ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    async def connect(self, on_status: object, on_lost: object) -> ControlLink:
        raise Unavailable("there is no process")

    async def wait(self) -> Exit:
        return await asyncio.shield(self.ended)

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    async def activity_s(self) -> float | None:
        return None

    async def stop(self, grace_s: float, *, sigterm: bool = True) -> Exit:
        self.stops.append(grace_s)
        if self.immortal:
            raise LaunchFailed("process 1 is still there")
        self.ended.set_result(Exit(-9))
        return self.ended.result()


class Launcher:
    """Launches `handle`, once it is allowed to."""

    def __init__(self, handle: Handle | None = None) -> None:
        self.handle = handle
        self.allowed = asyncio.Event()

    async def start(self) -> None:
        return None

    async def launch(self, spec: WorkerSpec) -> Handle:
        await self.allowed.wait()
        if self.handle is None:
            raise LaunchFailed("no process for us")
        return self.handle

    async def adopt(self, accepts: Callable[[WorkerSpec], bool]) -> list[Adopted]:
        return []

    async def close(self) -> None:
        return None


async def plan() -> WorkerSpec:
    return SPEC


async def exit_of(attempt: WorkerRun, news: list[Observation]) -> Exit:
    await asyncio.wait_for(attempt.run(), LIMIT_S)
    assert isinstance(news[-1], Exited)
    return news[-1].exit


async def test_a_process_that_nothing_ends_is_given_up_with_words() -> None:
    news: list[Observation] = []
    launcher = Launcher(Handle(immortal=True))
    launcher.allowed.set()
    attempt = WorkerRun(launcher, plan, ProbePlan(), news.append)
    attempt.set_threads(CpuThreads(2, 2))
    asyncio.get_running_loop().call_later(0.01, attempt.end, 0.0)

    exit = await exit_of(attempt, news)

    assert exit.report == ExitReport(Code.INTERNAL_ERROR, "process 1 is still there", permanent=True)


async def test_a_launch_that_fails_may_be_tried_again() -> None:
    news: list[Observation] = []
    launcher = Launcher()
    launcher.allowed.set()

    exit = await exit_of(WorkerRun(launcher, plan, ProbePlan(), news.append), news)

    assert exit.report == ExitReport(Code.INTERNAL_ERROR, "no process for us", permanent=False)


@pytest.mark.parametrize(("error", "permanent"), [(InvalidGpuId(1, []), True), (Unavailable("driver is busy"), False)])
async def test_a_plan_that_fails_is_permanent_when_it_would_fail_again(error: TeimgrError, permanent: bool) -> None:
    news: list[Observation] = []

    async def fail() -> WorkerSpec:
        raise error

    exit = await exit_of(WorkerRun(Launcher(), fail, ProbePlan(), news.append), news)

    assert exit.report == ExitReport(error.code, error.message, permanent)


@pytest.mark.parametrize("early", [True, False])
async def test_an_end_before_the_process_exists_cancels_the_launch(early: bool) -> None:
    news: list[Observation] = []
    attempt = WorkerRun(Launcher(Handle()), plan, ProbePlan(), news.append)
    if early:
        attempt.end(5.0)
    else:
        asyncio.get_running_loop().call_later(0.01, attempt.end, 5.0)

    exit = await exit_of(attempt, news)

    assert exit.report is not None
    assert exit.report.message == "stopped before it was launched"


async def test_an_end_after_the_process_is_gone_does_nothing() -> None:
    news: list[Observation] = []
    handle = Handle()
    launcher = Launcher(handle)
    launcher.allowed.set()
    attempt = WorkerRun(launcher, plan, ProbePlan(), news.append)
    handle.ended.set_result(Exit(0))

    assert await exit_of(attempt, news) == Exit(0)
    attempt.end(1.0)
    assert handle.stops == []


async def test_a_defect_in_a_launch_ends_the_attempt_and_may_be_tried_again() -> None:
    news: list[Observation] = []

    async def fail() -> WorkerSpec:
        raise FileNotFoundError("run/nursery.log")

    exit = await exit_of(WorkerRun(Launcher(), fail, ProbePlan(), news.append), news)

    assert exit.report == ExitReport(Code.INTERNAL_ERROR, "FileNotFoundError: run/nursery.log", permanent=False)


async def test_a_defect_beside_a_live_worker_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    news: list[Observation] = []
    handle = Handle()
    launcher = Launcher(handle)
    launcher.allowed.set()
    attempt = WorkerRun(launcher, plan, ProbePlan(), news.append)

    async def fail() -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(attempt, "_keep_probing", fail)
    exit = await exit_of(attempt, news)

    assert exit.report is not None
    assert (exit.report.permanent, handle.stops) == (False, [0])
    attempt.end(1.0)


async def test_a_cancelled_attempt_leaves_the_process_alone() -> None:
    news: list[Observation] = []
    handle = Handle()
    launcher = Launcher(handle)
    launcher.allowed.set()
    attempt = WorkerRun(launcher, plan, ProbePlan(), news.append)
    running = asyncio.create_task(attempt.run())
    await asyncio.sleep(0.01)
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running

    assert (handle.stops, news) == ([], [LoadBegan()])


class AnsweringLink(ControlLink):
    """A link whose requests are answered by the time they are awaited."""

    def begin(self, method: Method, payload: bytes = b"", *, timeout_s: float) -> asyncio.Future[bytes]:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        answer.set_result(b'{"batches": 1}')
        return answer


@pytest.mark.parametrize("turns", range(6))
async def test_no_cancellation_is_lost_that_comes_with_an_answer(turns: int) -> None:
    """Else the supervision of a worker that ends in this moment would never end."""
    link = AnsweringLink(lambda status: None, lambda: None)
    for waiting in (Prober(5.0).probe(link), link.call(Method.STATS, timeout_s=5.0)):
        task = asyncio.create_task(waiting)  # type: ignore[arg-type]
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.cancel():  # it was under way
            await asyncio.wait({task})
            assert task.cancelled()
