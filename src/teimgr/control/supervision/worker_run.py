"""Runs one worker process from launch or adoption to exit, reported as events; probes its health."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from teimgr.control.launch.control_link import ControlLink, WorkerStatus, open_control_link
from teimgr.control.launch.launcher import Adopted, Launcher, WorkerHandle
from teimgr.control.launch.process_handle import Exit, ExitReport, LaunchFailed, WorkMeter
from teimgr.control.supervision.lifecycle import (
    Exited,
    FailureCause,
    LoadBegan,
    Observation,
    ProbeFailed,
    ProbeOk,
    WorkerDownloading,
    WorkerDraining,
    WorkerFailed,
    WorkerReady,
)
from teimgr.errors import Code, DeadlineExceeded, Refused, TeimgrError, Unavailable
from teimgr.observability.logs import STACKS_SIGNAL
from teimgr.spec import CpuThreads, WorkerEndpoint, WorkerSpec
from teimgr.wire.fleet_tls import FleetIdentity
from teimgr.wire.frames import CALLS_AND_MEMORY, Method
from teimgr.wire.routing.directory import Directory

RECONNECT_FIRST_S = 0.05
RECONNECT_MAX_S = 5.0
# Limit of the event loop's answer to a probe, and the pause after a failed probe. Three failures, the default limit,
# take under five seconds.
ANSWER_LIMIT_S = 1.4
_RETRY_PAUSE_S = 0.2
# An idle healthy worker answers a probe within this time. After it, a second request checks the event loop.
_AT_ONCE_S = 0.3
_HANDOVER_LIMIT_S = 10.0  # a worker that takes longer to confirm a handover is killed
_NEVER_LAUNCHED = "stopped before it was launched"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """Interval and timeout of the health probes of a ready worker."""

    interval_s: float = 10.0
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory reported by a worker; None if not reported. `device_bytes` is what its allocator holds."""

    resident_bytes: int
    private_bytes: int | None = None
    device_bytes: int = 0

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> MemoryReading | None:
        """Read an answer to PROBE or STATS; None if the worker reports no memory.

        Raises:
            ValueError, TypeError: it cannot be read.
        """
        resident, private = answer.get("resident_bytes"), answer.get("private_bytes")
        if resident is None:
            return None
        return cls(int(resident), None if private is None else int(private), int(answer.get("device_bytes") or 0))


class Usage(NamedTuple):
    """Calls of a worker, including messages of streams: the total since its start, and those in flight."""

    calls: int
    under_way: int


class WorkerRun:
    """Holds one worker's process handle and control link, probes it, and ends it.

    `plan` waits for a load slot and makes the spec. `post` gets the events in the event loop; `Exited` is the last.
    `on_memory` gets the reported memory or None when the worker is ready, with True for a new worker, and after each
    good probe.
    """

    def __init__(
        self,
        launcher: Launcher,
        plan: Callable[[], Awaitable[WorkerSpec]],
        probes: ProbePlan,
        post: Callable[[Observation], None],
        adopted: Adopted | None = None,
        on_memory: Callable[[MemoryReading | None, bool], None] = lambda reading, fresh: None,
    ) -> None:
        self.handle = adopted.handle if adopted else None
        self.status = adopted.status if adopted else None
        self.is_adopted = adopted is not None
        self._launcher = launcher
        self._plan = plan
        self._probes = probes
        self._post = post
        self._on_memory = on_memory
        self.alarm: str | None = None
        """What recently blocked the worker's event loop, reported by its watchdog."""
        self._link: ControlLink | None = None
        self._threads: CpuThreads | None = None
        self._sent_threads: CpuThreads | None = None  # over the current link
        self._ready = asyncio.Event()
        self._grace_s: float | None = None
        self._handover = False
        self._left_ports = asyncio.Event()
        self._launching: asyncio.Task[WorkerHandle] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._stuck: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

    @property
    def is_ready(self) -> bool:
        return self.status is not None and self.status.state == "ready"

    async def run(self) -> None:
        """Return when the process has ended; never raises, since every error is a way in which the worker ended."""
        try:
            exit = await self._run()
        except LaunchFailed as error:
            exit = Exit(None, ExitReport(Code.INTERNAL_ERROR, str(error), permanent=False))
        except TeimgrError as error:
            exit = Exit(None, ExitReport(error.code, error.message, permanent=isinstance(error, Refused)))
        except Exception as error:  # without `Exited` the supervisor would wait forever
            log.exception("supervision of a worker failed")
            exit = await self._abandon(error)
        self._left_ports.set()
        self._post(Exited(exit, random.random()))

    async def usage(self) -> tuple[Usage, MemoryReading | None] | None:
        """Return the calls and the memory that the worker reports; None if it does not answer."""
        if (link := self._link) is None:
            return None
        try:
            stats = json.loads(await link.call(Method.STATS, CALLS_AND_MEMORY, timeout_s=ANSWER_LIMIT_S))
            return Usage(stats.get("taken", stats.get("requests", 0)), stats["calls"]), MemoryReading.of(stats)
        except (TeimgrError, ValueError, KeyError, TypeError) as error:
            log.debug("worker did not report its calls", extra={"reason": str(error)})
            return None

    async def left_ports(self) -> None:
        """Return when a worker that hands over answers no new request on its ports, or has ended."""
        if self._handover:
            await self._left_ports.wait()

    def end(self, grace_s: float, *, handover: bool = False) -> None:
        """Let the worker finish its calls within `grace_s`, then kill it. A later call may shorten the grace.

        With `handover` its successors get its connections; `left_ports` waits for that.
        """
        self._grace_s = grace_s
        self._handover |= handover
        if self._launching is not None:
            if not self._launching.cancelling():  # a second cancellation would interrupt the cleanup
                self._launching.cancel()
        elif self.handle is not None and self._tasks is not None:
            self._begin_stop(self.handle, grace_s)

    def set_threads(self, threads: CpuThreads) -> None:
        """Send the worker its CPU threads, now and after every reconnection."""
        self._threads = threads
        self._send_threads()

    async def _run(self) -> Exit:
        handle = self.handle = self.handle or await self._launch()
        if self.is_ready:
            self._ready.set()
        async with asyncio.TaskGroup() as self._tasks:
            if self._grace_s is not None:
                self._begin_stop(handle, self._grace_s)
            link = self._tasks.create_task(self._keep_link(handle))
            probes = self._tasks.create_task(self._keep_probing())
            waiting = asyncio.create_task(handle.wait())
            try:
                await asyncio.wait({waiting, self._stuck}, return_when=asyncio.FIRST_COMPLETED)
                exit = waiting.result() if waiting.done() else self._stuck.result()
            finally:
                self._tasks = None  # makes `end` return at once
                waiting.cancel()
            link.cancel()
            probes.cancel()
        return exit

    async def _launch(self) -> WorkerHandle:
        if self._grace_s is not None:
            raise LaunchFailed(_NEVER_LAUNCHED)

        async def launch() -> WorkerHandle:
            spec = await self._plan()
            self._post(LoadBegan())
            return await self._launcher.launch(spec)

        self._launching = asyncio.create_task(launch())
        try:
            return await self._launching
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise LaunchFailed(_NEVER_LAUNCHED) from None  # cancelled by `end`
        finally:
            self._launching = None

    async def _abandon(self, defect: Exception) -> Exit:
        """Kill a worker that can no longer be supervised, so that no second one runs beside it."""
        report = ExitReport(Code.INTERNAL_ERROR, f"{type(defect).__name__}: {defect}", permanent=False)
        try:
            if self.handle is not None:
                await self.handle.stop(0)
        except LaunchFailed as error:
            report = ExitReport(Code.INTERNAL_ERROR, str(error), permanent=True)
        except Exception:  # already logged
            log.exception("worker not ended", extra={"instance": self.handle.spec.name if self.handle else None})
        return Exit(None, report)

    # Stop

    def _begin_stop(self, handle: WorkerHandle, grace_s: float) -> None:
        """Make the worker drain, by DRAIN on its link or by SIGTERM, and kill it after the grace."""
        assert self._tasks is not None
        drains = False
        if grace_s > 0 and self._link is not None and self._link.is_open:
            drains = True
            self._tasks.create_task(self._drain(self._link, handle, grace_s))
        self._tasks.create_task(self._stop(handle, grace_s, sigterm=not drains))

    async def _drain(self, link: ControlLink, handle: WorkerHandle, grace_s: float) -> None:
        try:
            await link.drain(grace_s, handover=self._handover, timeout_s=_HANDOVER_LIMIT_S)
            self._left_ports.set()
        except TeimgrError as error:
            log.warning("no answer to DRAIN", extra={"instance": handle.spec.name, "reason": error.message})
            if self._handover:
                await self._stop(handle, 0.0, sigterm=False)

    async def _stop(self, handle: WorkerHandle, grace_s: float, *, sigterm: bool) -> None:
        try:
            await handle.stop(grace_s, sigterm=sigterm)
        except LaunchFailed as error:
            log.error("worker does not die", extra={"instance": handle.spec.name, "reason": str(error)})
            if not self._stuck.done():
                self._stuck.set_result(Exit(None, ExitReport(Code.INTERNAL_ERROR, str(error), permanent=True)))

    # Control link

    async def _keep_link(self, handle: WorkerHandle) -> None:
        """Stay connected until cancelled; the handle notices the end of the process."""
        pause_s = RECONNECT_FIRST_S
        while True:
            lost = asyncio.Event()
            try:
                self._sent_threads = None
                self._link = await handle.connect(self._on_status, lost.set)
                await lost.wait()
            except TeimgrError as error:
                log.debug("no control link", extra={"instance": handle.spec.name, "reason": error.message})
            finally:
                link, self._link = self._link, None
                if link is not None:
                    link.close()
            await asyncio.sleep(pause_s)
            pause_s = min(RECONNECT_MAX_S, pause_s * 2)

    def _on_status(self, status: WorkerStatus) -> None:
        if self.handle is None or status.incarnation != self.handle.incarnation:
            return
        before, self.status = self.status, status
        self._send_threads()
        if before is not None and (before.state, before.reason) == (status.state, status.reason):
            return
        match status.state:
            case "ready":
                self._ready.set()
                self._post(WorkerReady())
            case "failed":
                reason = status.reason or "the worker failed"
                self._post(WorkerFailed(FailureCause.reported(reason, status.code, status.permanent)))
            case "downloading":
                self._post(WorkerDownloading())
            case "draining":
                self._post(WorkerDraining())

    def _send_threads(self) -> None:
        if self._link is None or self._threads is None or self._threads == self._sent_threads or not self.is_ready:
            return
        if self._link.notify(Method.THREADS, threads=self._threads.own, most=self._threads.most):
            self._sent_threads = self._threads

    # Health probes

    async def _keep_probing(self) -> None:
        """Probe the ready worker at intervals, and in quick succession while probes fail."""
        prober, interval_s = Prober(self._probes.timeout_s), self._probes.interval_s
        clock = asyncio.get_running_loop().time
        await self._ready.wait()
        await self._read_memory_at_start()
        pause_s, failing = interval_s, False
        while True:
            await asyncio.sleep(pause_s)
            began = clock()
            async with WorkMeter(self.handle) as meter:
                try:
                    await prober.probe(self._link)
                except TeimgrError as error:
                    if not failing and self.handle is not None:
                        self.handle.send_signal(STACKS_SIGNAL)
                    failing = True
                    link = self._link
                    missed = isinstance(error, DeadlineExceeded) or link is None or not link.is_open
                    works = isinstance(error, NoAnswer) and await meter.has_worked()
                    pause_s = min(interval_s, max(_RETRY_PAUSE_S, began + ANSWER_LIMIT_S - clock()))
                    self._post(ProbeFailed(error.message, missed, works))
                    continue
            pause_s, failing = interval_s, False
            self._post(ProbeOk())
            self.alarm = prober.alarm
            if prober.memory is not None:
                self._on_memory(prober.memory, False)

    async def _read_memory_at_start(self) -> None:
        """Pass on the first memory reading, or None; later readings count as those of a running worker."""
        found = None
        try:
            if self._link is not None:
                found = MemoryReading.of(json.loads(await self._link.call(Method.STATS, timeout_s=ANSWER_LIMIT_S)))
        except (TeimgrError, ValueError, TypeError, AttributeError) as error:
            log.debug("new worker did not report its memory", extra={"reason": str(error)})
        self._on_memory(found, not self.is_adopted)


class NoAnswer(DeadlineExceeded):
    """The worker's event loop did not answer; a busy device alone does not cause this."""


class Prober:
    """Probes one worker repeatedly; a worker that has run batches since the last probe is healthy without one."""

    def __init__(self, timeout_s: float) -> None:
        self.memory: MemoryReading | None = None
        """Memory at the last good probe; None before that, or if not reported."""
        self.alarm: str | None = None
        """Message of the worker's loop watchdog at the last good probe."""
        self._timeout_s = timeout_s
        self._batches: int | None = None

    async def probe(self, link: ControlLink | None) -> None:
        """Check the worker; return when it is healthy.

        Raises:
            TeimgrError: it is not healthy; the message is the reason.
        """
        if link is None:
            raise Unavailable("the worker's control link is down")
        payload = json.dumps({"batches": self._batches}).encode()
        answer = link.begin(Method.PROBE, payload, timeout_s=self._timeout_s)
        try:
            if not (await asyncio.wait((answer,), timeout=_AT_ONCE_S))[0]:
                # A busy device delays PROBE, but not STATS, which the event loop answers.
                try:
                    await link.call(Method.STATS, timeout_s=min(self._timeout_s, ANSWER_LIMIT_S) - _AT_ONCE_S)
                except DeadlineExceeded as error:
                    raise NoAnswer(error.message) from None
            async with asyncio.timeout(self._timeout_s - _AT_ONCE_S):
                reply = await answer
            values = json.loads(reply)
            self._batches = int(values["batches"])
            self.memory = MemoryReading.of(values)
            self.alarm = values.get("alarm")
        except TimeoutError:
            raise DeadlineExceeded(f"no answer to PROBE within {self._timeout_s:g} s") from None
        except (ValueError, TypeError, KeyError) as error:
            raise Unavailable(f"the worker's answer to PROBE cannot be read: {error!r}") from error
        finally:
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # marks it as retrieved


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one worker's probe; `problem` is None for a healthy worker."""

    incarnation: str
    seconds: float
    problem: str | None


class FleetProber:
    """Probes the workers that the directory lists, each over its own control link."""

    def __init__(self, directory: Directory, timeout_s: float, identity: FleetIdentity | None = None) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self._identity = identity

    async def probe(self, name: str) -> list[ProbeResult]:
        """Return a result for each serving worker of the instance; empty if the instance does not run."""
        entry = self._directory.entry(name)
        return list(await asyncio.gather(*(self._probe(each) for each in (entry.endpoints if entry else ()))))

    def has_workers(self, name: str) -> bool:
        """True if the instance has workers that `probe` would check."""
        entry = self._directory.entry(name)
        return entry is not None and bool(entry.endpoints)

    async def _probe(self, endpoint: WorkerEndpoint) -> ProbeResult:
        begun, problem = time.monotonic(), None
        try:
            async with asyncio.timeout(self._timeout_s):
                link = await open_control_link(endpoint, self._identity, lambda status: None, lambda: None)
                try:
                    await Prober(self._timeout_s).probe(link)
                finally:
                    link.close()
        except TeimgrError as error:
            problem = error.message
        except TimeoutError:
            problem = f"no answer to the self-test within {self._timeout_s:g} s"
        return ProbeResult(endpoint.incarnation, time.monotonic() - begun, problem)
