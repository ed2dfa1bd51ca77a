"""Supervisor of one replica: a task that feeds events from a mailbox to the state machine and executes its effects.

It is the only writer of the replica's state. Event handling never waits: launches and stops run in a `WorkerRun` and
report back as events, so the mailbox stays short.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any, Protocol

from teimgr.control.launch.launcher import Adopted, Launcher
from teimgr.control.launch.process_handle import Exit, LaunchFailed
from teimgr.control.ledger.ledger import Overrun, Place, Reservation
from teimgr.control.placement.planner import Planner
from teimgr.control.supervision.crash_reports import Crash
from teimgr.control.supervision.fleet_records import FleetRecords
from teimgr.control.supervision.lifecycle import (
    Command,
    CommandRefused,
    Effect,
    Event,
    Exited,
    Observation,
    Phase,
    ProbeFailed,
    ProbeOk,
    ReplicaState,
    RestartPolicy,
    Tick,
    WorkerDownloading,
    WorkerHealth,
    WorkerReady,
    explain,
)
from teimgr.control.supervision.worker_run import MemoryReading, ProbePlan, Usage, WorkerRun
from teimgr.errors import AlreadyRunning, InstanceNotFound, NotRunning, OutOfDeviceMemory, TeimgrError, Unavailable
from teimgr.observability import catalogue
from teimgr.spec import (
    CpuThreads,
    Incident,
    InstanceSpec,
    LoadedModel,
    State,
    WorkerEndpoint,
    WorkerSpec,
    WorkerView,
    rfc3339,
)

log = logging.getLogger(__name__)


class LifecycleTask:
    """One process under the table of `lifecycle.py`: its state, and the mailbox of the only task that changes it.

    `facts` identify the process in the log.
    """

    def __init__(self, policy: RestartPolicy, facts: Mapping[str, Any]) -> None:
        self._replica = ReplicaState(policy=policy)
        self._facts = facts

    @cached_property
    def _mailbox(self) -> asyncio.Queue[Any]:
        """The unbounded mailbox: each event is handled at once, and few tasks send any."""
        return asyncio.Queue()

    async def _next(self) -> Any:
        """Return the next item of the mailbox, or a `Tick` when the time that the state waits for has come."""
        try:
            async with asyncio.timeout_at(self._replica.wake_at):
                return await self._mailbox.get()
        except TimeoutError:
            return Tick()

    def _advance(self, event: Event) -> list[Effect]:
        """Step the state machine and log a change of its phase; return the effects."""
        before = self._replica.phase
        self._replica, effects = self._replica.step(event, asyncio.get_running_loop().time())
        phase, reason = self._replica.phase, self._replica.reason
        if phase is not before:
            level = {Phase.FAILED: logging.ERROR, Phase.WAITING: logging.WARNING}.get(phase, logging.INFO)
            change = {"from": before.name.lower(), "to": phase.name.lower()} | ({"reason": reason} if reason else {})
            log.log(level, "phase", extra={**self._facts, **change})
        return effects


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorContext:
    """Shared by all supervisors. `grace_s` is how long a stopped worker may finish its calls."""

    policy: RestartPolicy
    probes: ProbePlan
    grace_s: float
    launcher: Launcher
    planner: Planner
    records: FleetRecords


class Owner(Protocol):
    """The instance of a supervisor, called in the event loop."""

    placing: asyncio.Lock
    """Held while a worker gets its place and memory, so the next placement counts them."""

    def siblings_of(self, supervisor: Supervisor) -> Sequence[Supervisor]:
        """The other replicas that will serve with it."""

    def on_state_changed(self) -> None:
        """Called after every change of a worker's state or card."""

    def on_placed(self) -> None:
        """Called when a worker has got its memory."""

    def on_crash(self, supervisor: Supervisor, incident: Incident) -> None:
        """Called when its worker has crashed; `on_state_changed` follows."""

    def on_memory(self, supervisor: Supervisor, resident_bytes: int, fresh: bool) -> None:
        """Called with the worker's resident memory in bytes; `fresh`: it has just become ready."""

    def on_overrun(self, supervisor: Supervisor, overrun: Overrun) -> None:
        """Called when the worker takes more memory than was reserved for it."""


@dataclass(frozen=True, slots=True)
class _Request:
    command: Command
    accepted: asyncio.Future[None]


class Supervisor(LifecycleTask):
    """Supervises the `number`-th replica of the instance `spec`.

    `role` is its part in an update, as in `WorkerView`. `host` ("" in a fleet of one host) and `gpu`, the UUID of the
    card, are the place of the current or next worker. Objects of the task are created when the task begins, since
    thousands of instances may never start.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        number: int,
        role: str,
        context: SupervisorContext,
        owner: Owner,
    ) -> None:
        super().__init__(_policy_of(spec, context), {"instance": spec.name, "replica": number})
        self.spec = spec
        self.number = number
        self.role = role
        self.host = ""
        self.gpu: str | None = None
        self.place: Place | None = None
        """The current worker's place, from before its launch until its process has ended."""
        self.model: LoadedModel | None = None
        """The last ready worker's model."""
        self._context = context
        self._owner = owner
        self._worker: WorkerRun | None = None
        self._worker_tasks: asyncio.TaskGroup | None = None
        self._threads: CpuThreads | None = None
        self._probed_at: datetime | None = None
        self._give_back: Callable[[], None] | None = None  # frees the load slot
        self._reservation: Reservation | None = None  # held until the worker's process has ended
        self._private_bytes: int | None = None
        self._destination: Place | None = None  # chosen place of the first worker
        self._closed = False

    @cached_property
    def started(self) -> asyncio.Event:
        """Set once `run` has begun and an adopted worker is taken over."""
        return asyncio.Event()

    @cached_property
    def _settled(self) -> asyncio.Condition:
        return asyncio.Condition()

    # Commands

    async def accept(self, command: Command) -> None:
        """Return when the command is accepted, not when it is carried out; `settle` waits for that.

        Raises:
            AlreadyRunning, NotRunning, InstanceNotFound: it is not allowed in the present state.
        """
        if self._closed:
            raise self._closed_error()
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._mailbox.put_nowait(_Request(command, accepted))
        await accepted

    async def settle(self) -> None:
        """Return as soon as no process is ending."""
        if self._closed or not self._replica.is_ending:
            return
        async with self._settled:
            await self._settled.wait_for(lambda: self._closed or not self._replica.is_ending)

    async def left_ports(self) -> None:
        """Return when a worker that is being retired answers no new request on its ports, or has ended."""
        if self._worker is not None:
            await self._worker.left_ports()

    async def usage(self) -> Usage | None:
        """Return the calls that the present worker reports, None without an answer; also settle its memory in the
        ledger."""
        if (worker := self._worker) is None or (found := await worker.usage()) is None:
            return None
        usage, reading = found
        if reading is not None and worker is self._worker:
            self._settle_memory(reading)
        return usage

    def go_to(self, destination: Place) -> None:
        """Place its first worker there; later ones are placed like any other."""
        self._destination = destination

    def join(self) -> None:
        """Serve from now on: the update that started this replica is committed."""
        self.role = "serving"

    def leave(self) -> None:
        """Get no more calls: an update has replaced it by other replicas."""
        self.role = "leaving"

    def respecify(self, spec: InstanceSpec) -> None:
        """Replace the spec by one that makes no difference to the present worker."""
        self.spec = spec
        self._replica = replace(self._replica, policy=_policy_of(spec, self._context))

    def set_threads(self, threads: CpuThreads) -> None:
        self._threads = threads
        if self._worker is not None:
            self._worker.set_threads(threads)

    def force_stop(self) -> None:
        if self._worker is not None and self._replica.is_ending:
            self._worker.end(0.0)

    def mark_failed(self, reason: str) -> None:
        """Mark the replica as one that cannot be started as it is; call this before `run`."""
        self._replica = ReplicaState.failed(self._replica.policy, reason)

    # State

    @property
    def is_closed(self) -> bool:
        """True if its task has ended, so that it takes no more commands."""
        return self._closed

    @property
    def state(self) -> State:
        return self._replica.phase.state

    @property
    def is_wanted(self) -> bool:
        return self._replica.is_wanted

    @property
    def rests(self) -> bool:
        """True if it has no process and no start is scheduled: its view only changes by an event."""
        replica = self._replica
        return self._worker is None and replica.wake_at is None and replica.phase in (Phase.STOPPED, Phase.FAILED)

    @property
    def has_failed(self) -> bool:
        """True if the last worker failed, or was ended to be replaced, and has no running successor yet."""
        was_ended = self._replica.phase in (Phase.FAILED, Phase.WAITING, Phase.REPLACING)
        return was_ended or self._replica.failure is not None

    @property
    def reservation(self) -> Reservation | None:
        """The memory of the present worker."""
        return self._reservation

    @property
    def is_placed(self) -> bool:
        """True if the present worker has its memory, or will not get it."""
        return self._reservation is not None or self.has_failed or self.state is not State.STARTING

    @property
    def restarts(self) -> int:
        return self._replica.restarts

    @property
    def reason(self) -> str | None:
        return self._replica.reason

    @property
    def retry_s(self) -> float | None:
        """Seconds until a failed replica is restarted; None: it is not restarted automatically."""
        at = self._replica.wake_at
        if self._replica.phase is not Phase.FAILED or at is None:
            return None
        return max(0.0, at - asyncio.get_running_loop().time())

    @property
    def failure_code(self) -> int | None:
        """The `errors.Code` number that its last failed worker reported."""
        return self._replica.last_code

    @property
    def start_problem(self) -> str | None:
        """A sentence if it keeps restarting; None otherwise."""
        if not self._replica.is_failing(asyncio.get_running_loop().time()):
            return None
        return f"it failed {self._replica.streak} times in a row, the last time because {self._replica.last_failure}"

    @property
    def incarnation(self) -> str | None:
        """The incarnation of the present worker's process."""
        handle = self._worker.handle if self._worker else None
        return handle.incarnation if handle else None

    @property
    def worker_alarm(self) -> str | None:
        """What blocked the event loop of the present worker recently."""
        return self._worker.alarm if self._worker else None

    @property
    def threads(self) -> int | None:
        """The CPU threads that belong to the present worker; it may use more while others are idle."""
        return self._threads.own if self._threads and self._worker and self._worker.handle else None

    @property
    def health(self) -> WorkerHealth | None:
        """The health of the present worker, while it runs."""
        return self._replica.health if self._replica.phase is Phase.RUNNING else None

    @property
    def endpoint(self) -> WorkerEndpoint | None:
        """The address of the present worker, while it runs."""
        handle = self._worker.handle if self._worker else None
        if handle is None or self._replica.phase is not Phase.RUNNING:
            return None
        status = self._worker.status if self._worker else None
        node, address = (status.node, status.address) if status else ("", "")
        space, precision = (self.model.space, self.model.precision) if self.model else ("", "")
        return WorkerEndpoint(str(handle.socket), handle.incarnation, node, address, space, precision)

    def view(self) -> WorkerView:
        replica, handle = self._replica, self._worker.handle if self._worker else None
        status = self._worker.status if self._worker else None
        download = status.reason if status and status.state == "downloading" else None
        next_s = replica.next_attempt_s(asyncio.get_running_loop().time())
        return WorkerView(
            replica=self.number,
            role=self.role,
            state=self.state,
            node=self.host or None,
            gpu=self.gpu,
            gpu_id=self._context.planner.index_of(self.gpu),
            pid=handle.pid if handle else None,
            incarnation=handle.incarnation if handle else None,
            uptime_secs=max(0, int(time.time() - handle.started_at)) if handle else None,
            restarts=replica.restarts,
            health_check_failures=replica.probe_failures,
            last_health_check=rfc3339(self._probed_at) if self._probed_at else None,
            reason=download or replica.reason,
            private_bytes=self._private_bytes,
            attempt=replica.attempt,
            next_attempt_secs=None if next_s is None else math.ceil(next_s),
        )

    # The task

    async def run(self, adopted: Adopted | None = None) -> None:
        """Supervise until the replica is deleted; a cancellation leaves the worker running, a defect ends it."""
        try:
            async with asyncio.TaskGroup() as self._worker_tasks:
                if adopted is not None:
                    self._adopt(adopted)
                self.started.set()
                while not self._is_over:
                    await self._handle(await self._next())
        except Exception as defect:  # end the worker, which would otherwise be unsupervised
            await self._abandon(defect)
            raise
        finally:
            await self._close()

    async def _abandon(self, defect: Exception) -> None:
        handle = self._worker.handle if self._worker else None
        reason = f"its supervision failed: {type(defect).__name__}; restart the daemon"
        self._replica = ReplicaState.failed(self._replica.policy, reason)
        if handle is not None:
            try:
                await handle.stop(0)
            except LaunchFailed as error:
                log.error("worker does not die", extra={"instance": self.spec.name, "reason": str(error)})
        self._worker = None
        self._owner.on_state_changed()

    @property
    def _is_over(self) -> bool:
        return self._replica.deleted and self._replica.phase is Phase.STOPPED

    async def _handle(self, item: _Request | Observation) -> None:
        if isinstance(item, _Request):
            self._answer(item)
        else:
            has_crashed = isinstance(item, Exited) and self._report_crash(item.exit)
            self._record(item)
            if isinstance(item, Tick):
                item = Tick(any(each.state is State.RUNNING for each in self._owner.siblings_of(self)))
            self._step(item, has_crashed=has_crashed)
        async with self._settled:
            self._settled.notify_all()

    def _answer(self, request: _Request) -> None:
        refusal: TeimgrError | None = None
        try:
            self._step(request.command)
        except CommandRefused:
            refusal = self._refusal(request.command)
        if request.accepted.done():
            return
        if refusal is not None:
            request.accepted.set_exception(refusal)
        else:
            request.accepted.set_result(None)

    def _refusal(self, command: Command) -> TeimgrError:
        state = self.state.value
        if self._replica.deleted:
            return InstanceNotFound(self.spec.name)
        return NotRunning(self.spec.name, state) if command is Command.STOP else AlreadyRunning(self.spec.name, state)

    def _record(self, event: Observation) -> None:
        """Update what views and metrics show; no decision depends on it."""
        if isinstance(event, WorkerReady | WorkerDownloading | Exited):  # a download may take hours
            self._release_slot()
        match event:
            case ProbeOk():
                self._probed_at = datetime.now(UTC)
            case ProbeFailed(reason):
                self._context.records.metrics.count(catalogue.PROBE_FAILURES, self.spec.name)
                log.warning("probe failed", extra={"instance": self.spec.name, "reason": reason})
            case Exited():
                self._worker = self.place = self._private_bytes = None
                self._release_memory()

    def _report_crash(self, exit: Exit) -> bool:
        """Write a crash report on a thread; False if the worker was ended by order or never was a process."""
        replica, handle = self._replica, self._worker.handle if self._worker else None
        if handle is None or (replica.is_ending and replica.failure is None):
            return False
        assert self._worker_tasks is not None
        crash = Crash(
            instance=self.spec.name,
            replica=self.number,
            pid=handle.pid,
            started_at=handle.started_at,
            status=exit.status,
            reason=(replica.failure or explain(exit)).message,
            log=exit.log,
            spec=handle.spec,
        )
        incident, writing = self._context.records.crashed(crash)
        self._worker_tasks.create_task(writing, name=f"crash report of {self.spec.name}")
        self._owner.on_crash(self, incident)
        return True

    def _step(self, event: Event, *, has_crashed: bool = False) -> None:
        before = self._replica
        effects = self._advance(event)
        if before.phase is not self._replica.phase:
            self._on_phase_changed()
        if has_crashed or before != self._replica:
            self._owner.on_state_changed()
        for effect in effects:
            if effect is Effect.LAUNCH:
                self._start_worker(None)
            elif effect is not Effect.END and self._worker is not None:  # at END, `run` returns
                grace_s = 0.0 if effect is Effect.KILL else self._context.grace_s
                self._worker.end(grace_s, handover=effect is Effect.HAND_OVER)

    def _on_phase_changed(self) -> None:
        replica, worker, metrics = self._replica, self._worker, self._context.records.metrics
        if replica.phase is Phase.WAITING or (replica.phase is Phase.FAILED and replica.wake_at is not None):
            metrics.count(catalogue.RESTARTS, self.spec.name)
        if replica.phase is Phase.RUNNING:
            assert worker is not None
            self.model = worker.status.model if worker.status else None
            if worker.handle is not None and not worker.is_adopted:
                metrics.observe(
                    catalogue.WORKER_START, max(0.0, time.time() - worker.handle.started_at), self.spec.name
                )

    # The worker

    def _start_worker(self, adopted: Adopted | None) -> None:
        assert self._worker_tasks is not None
        context = self._context
        post = self._mailbox.put_nowait
        worker = WorkerRun(context.launcher, self._plan, context.probes, post, adopted, self._on_memory)
        if self._threads is not None:
            worker.set_threads(self._threads)
        self._worker = worker
        for family in (
            catalogue.RESTARTS,
            catalogue.PROBE_FAILURES,
        ):  # start at 0, so that alerts count the first increase
            context.records.metrics.count(family, self.spec.name, by=0)
        self._worker_tasks.create_task(worker.run(), name=f"worker of {self.spec.name}")

    async def _plan(self) -> WorkerSpec:
        """Place the next worker among those of the whole fleet, reserve its memory, and wait for a load slot."""
        planner = self._context.planner
        async with self._owner.placing:
            spec = await self._place()
        self._owner.on_placed()
        device = spec.gpu or spec.host or None
        await planner.slots.take(device)  # last: a load that waits for memory holds no slot
        self._give_back = partial(planner.slots.give_back, device)
        return spec

    async def _place(self) -> WorkerSpec:
        planner = self._context.planner
        await planner.refresh()
        await planner.memory.look(self.spec, planner.model_roots(self.spec))
        beside = [each.place for each in self._owner.siblings_of(self) if each.place is not None]
        destination, self._destination = self._destination, None
        spec = planner.plan(self.spec, self.number, planner.others(self.spec, beside), destination)
        spec = replace(spec, restarts=self._replica.restarts)
        self.place = Place(spec.host, spec.gpu)
        if (self.host, self.gpu) != self.place:
            self.host, self.gpu = spec.host, spec.gpu
            self._owner.on_state_changed()
        try:
            self._reservation = await planner.memory.take(spec, planner.device_kind(spec.gpu))
        except OutOfDeviceMemory:
            self.place = None
            raise
        return spec

    def _on_memory(self, reading: MemoryReading | None, fresh: bool) -> None:
        """Report the worker's memory to the ledger, and to the instance, which decides whether it is too much."""
        self._settle_memory(reading)
        self._private_bytes = reading.private_bytes if reading is not None else None
        if reading is not None:
            self._owner.on_memory(self, reading.resident_bytes, fresh)

    def _settle_memory(self, reading: MemoryReading | None) -> None:
        reserved, worker = self._reservation, self._worker.handle if self._worker is not None else None
        if reserved is None or worker is None:
            return
        planner = self._context.planner
        if reading is None or reading.private_bytes is None:
            planner.memory.settle_as_reserved(reserved)
            return
        on_card = planner.bytes_on_card(worker.spec.gpu, worker.pid, reading.device_bytes)
        kind = planner.device_kind(worker.spec.gpu)
        overrun = planner.memory.settle(reserved, worker.spec, kind, reading.private_bytes, on_card)
        if overrun is not None:
            self._owner.on_overrun(self, overrun)

    def _adopt(self, adopted: Adopted) -> None:
        self._reservation = self._context.planner.memory.adopt(adopted.handle.spec)
        self.host, self.gpu = self.place = Place(adopted.handle.spec.host, adopted.handle.spec.gpu)
        self._replica = replace(self._replica, restarts=adopted.handle.spec.restarts)
        self._step(Command.ADOPT)
        self._start_worker(adopted)
        assert self._worker is not None
        if self._worker.is_ready:
            self._step(WorkerReady())  # at once, so that routers see no intermediate state

    def _release_slot(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def _release_memory(self) -> None:
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            self._context.planner.memory.release(reservation)

    async def _close(self) -> None:
        self._closed = True
        self._release_slot()
        self._release_memory()
        self.started.set()
        while not self._mailbox.empty():
            item = self._mailbox.get_nowait()
            if isinstance(item, _Request) and not item.accepted.done():
                item.accepted.set_exception(self._closed_error())
        async with self._settled:
            self._settled.notify_all()

    def _closed_error(self) -> TeimgrError:
        if self._is_over:
            return InstanceNotFound(self.spec.name)
        return Unavailable(f"Instance '{self.spec.name}' is not supervised any more")


def _policy_of(spec: InstanceSpec, context: SupervisorContext) -> RestartPolicy:
    limit_s = spec.startup_timeout_secs or context.policy.startup_timeout_s
    return replace(context.policy, startup_timeout_s=limit_s, for_calls=spec.load == "on_demand")
