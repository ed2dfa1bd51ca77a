"""One worker, from its launch or adoption to its end, told as events."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from teimgr.errors import Code, Refused, TeimgrError
from teimgr.launch.control_link import ControlLink, WorkerStatus
from teimgr.launch.launcher import Adopted, Exit, ExitReport, Launcher, LaunchFailed, WorkerHandle
from teimgr.spec import WorkerSpec
from teimgr.supervision.health import Prober
from teimgr.supervision.lifecycle_events import (
    Exited,
    FailureCause,
    News,
    ProbeFailed,
    ProbeOk,
    WorkerDownloading,
    WorkerDraining,
    WorkerFailed,
    WorkerReady,
)
from teimgr.wire.frames import Method

RECONNECT_FIRST_S = 0.05
RECONNECT_MAX_S = 5.0
_NEVER_LAUNCHED = "stopped before it was launched"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """How often a ready worker is asked for proof, and how long it may take."""

    interval_s: float = 10.0
    timeout_s: float = 10.0


class WorkerRun:
    """Owns the worker's handle, its control link, its probes and the ladder that ends it.

    `post` hears what happens, in the event loop; `Exited` is the last of it. `plan` says what to launch.
    """

    def __init__(
        self,
        launcher: Launcher,
        plan: Callable[[], Awaitable[WorkerSpec]],
        probes: ProbePlan,
        post: Callable[[News], None],
        adopted: Adopted | None = None,
    ) -> None:
        self.handle = adopted.handle if adopted else None
        self.status = adopted.status if adopted else None
        self.is_adopted = adopted is not None
        self._launcher = launcher
        self._plan = plan
        self._probes = probes
        self._post = post
        self._link: ControlLink | None = None
        self._threads: int | None = None
        self._told_threads: int | None = None
        self._ready = asyncio.Event()
        self._grace_s: float | None = None
        self._handover = False
        self._launching: asyncio.Task[WorkerHandle] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._stuck: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    @property
    def is_ready(self) -> bool:
        """Whether the worker last said that it is ready."""
        return self.status is not None and self.status.state == "ready"

    async def run(self) -> None:
        """The worker's whole life; never raises, for whatever goes wrong is how this worker ended."""
        try:
            exit = await self._live()
        except LaunchFailed as error:
            exit = Exit(None, ExitReport(Code.INTERNAL_ERROR, str(error), permanent=False))
        except TeimgrError as error:
            exit = Exit(None, ExitReport(error.code, error.message, permanent=isinstance(error, Refused)))
        except Exception as error:  # a defect; without an end told, no command would work any more
            log.exception("attempt ended by a defect")
            exit = await self._abandoned(error)
        self._post(Exited(exit, random.random()))

    def end(self, grace_s: float, *, handover: bool = False) -> None:
        """Let the worker finish within `grace_s`, then end it. A later call with less time hurries.

        With `handover` it serves, for some of that time, those who do not know yet that others serve now.
        """
        self._grace_s = grace_s
        self._handover = handover
        if self._launching is not None:
            self._launching.cancel()
        elif self.handle is not None and self._tasks is not None:
            self._climb(self.handle, grace_s)

    def set_threads(self, threads: int) -> None:
        """Tell the worker its share of the CPU, now and whenever it connects again."""
        self._threads = threads
        self._push_threads()

    async def _live(self) -> Exit:
        handle = self.handle = self.handle or await self._launch()
        if self.is_ready:
            self._ready.set()
        async with asyncio.TaskGroup() as self._tasks:
            if self._grace_s is not None:
                self._climb(handle, self._grace_s)
            keepers = [
                self._tasks.create_task(self._keep_link(handle)),
                self._tasks.create_task(self._keep_probing()),
            ]
            try:
                exit = await self._gone(handle)
            finally:
                self._tasks = None  # there is nothing left to end
            for keeper in keepers:
                keeper.cancel()
        return exit

    async def _abandoned(self, defect: Exception) -> Exit:
        """The end of a worker that cannot be attended to any more: no other may start beside it."""
        words = ExitReport(Code.INTERNAL_ERROR, f"{type(defect).__name__}: {defect}", permanent=False)
        try:
            if self.handle is not None:
                await self.handle.stop(0)
        except LaunchFailed as error:
            words = ExitReport(Code.INTERNAL_ERROR, str(error), permanent=True)
        except Exception:  # whatever was wrong before is still wrong
            log.exception("worker not seen out", extra={"instance": self.handle.spec.name if self.handle else None})
        return Exit(None, words)

    async def _launch(self) -> WorkerHandle:
        if self._grace_s is not None:
            raise LaunchFailed(_NEVER_LAUNCHED)
        self._launching = asyncio.create_task(self._planned_launch())
        try:
            return await self._launching
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise
            raise LaunchFailed(_NEVER_LAUNCHED) from None  # it was `end` that cancelled
        finally:
            self._launching = None

    async def _planned_launch(self) -> WorkerHandle:
        return await self._launcher.launch(await self._plan())

    async def _gone(self, handle: WorkerHandle) -> Exit:
        """The exit; when the ladder was climbed down in vain, words that say so."""
        waiting = asyncio.create_task(handle.wait())
        try:
            await asyncio.wait({waiting, self._stuck}, return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() else self._stuck.result()
        finally:
            waiting.cancel()

    # The ladder

    def _climb(self, handle: WorkerHandle, grace_s: float) -> None:
        how = {"grace_s": grace_s, "handover": self._handover}
        asked = grace_s > 0 and self._link is not None and self._link.tell(Method.DRAIN, **how)
        assert self._tasks is not None
        self._tasks.create_task(self._end(handle, grace_s, ask=not asked))

    async def _end(self, handle: WorkerHandle, grace_s: float, *, ask: bool) -> None:
        try:
            await handle.stop(grace_s, ask=ask)
        except LaunchFailed as error:
            log.error("worker does not die", extra={"instance": handle.spec.name, "reason": str(error)})
            if not self._stuck.done():
                self._stuck.set_result(Exit(None, ExitReport(Code.INTERNAL_ERROR, str(error), permanent=True)))

    # The link

    async def _keep_link(self, handle: WorkerHandle) -> None:
        """Stay connected until the process ends, which the handle sees."""
        pause_s = RECONNECT_FIRST_S
        while True:
            lost = asyncio.Event()
            try:
                self._link = await ControlLink.open(handle.socket, self._heard, lost.set)
                await lost.wait()
            except TeimgrError as error:
                log.debug("no control link", extra={"instance": handle.spec.name, "reason": error.message})
            finally:
                link, self._link = self._link, None
                if link is not None:
                    link.close()
            await asyncio.sleep(pause_s)
            pause_s = min(RECONNECT_MAX_S, pause_s * 2)

    def _heard(self, status: WorkerStatus) -> None:
        if self.handle is None or status.incarnation != self.handle.incarnation:
            return
        before, self.status = self.status, status
        self._told_threads = status.threads
        self._push_threads()
        if before is None or (before.state, before.reason) != (status.state, status.reason):
            self._changed(status)

    def _changed(self, status: WorkerStatus) -> None:
        match status.state:
            case "ready":
                self._ready.set()
                self._post(WorkerReady())
            case "failed":
                self._post(WorkerFailed(FailureCause(status.reason or "the worker failed", status.permanent)))
            case "downloading":
                self._post(WorkerDownloading())
            case "draining":
                self._post(WorkerDraining())

    def _push_threads(self) -> None:
        if self._link is None or self._threads in (None, self._told_threads) or not self.is_ready:
            return
        if self._link.tell(Method.THREADS, threads=self._threads):
            self._told_threads = self._threads

    # Proof

    async def _keep_probing(self) -> None:
        prober = Prober(self._probes.timeout_s)
        await self._ready.wait()
        while True:
            await asyncio.sleep(self._probes.interval_s)
            try:
                await prober.prove(self._link)
            except TeimgrError as error:
                self._post(ProbeFailed(error.message))
            else:
                self._post(ProbeOk())
