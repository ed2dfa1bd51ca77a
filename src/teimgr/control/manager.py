"""The only door to the instances: what is wanted, under which name, on which port, and who supervises it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

from teimgr.control.admission import Admission, check_fields
from teimgr.control.attempt import ProbePlan
from teimgr.control.cores import usable_cores
from teimgr.control.events import Command, Delete, Restart, Start, Stop
from teimgr.control.gpus import GpuInventory
from teimgr.control.model_check import check_model
from teimgr.control.placement import place
from teimgr.control.planner import Planner
from teimgr.control.restore import wanted_at_boot
from teimgr.control.store import Store
from teimgr.control.supervisor import Supervisor
from teimgr.control.surroundings import ControlMetrics, Surroundings, policy_of
from teimgr.control.workerspec import worker_spec
from teimgr.directory import Directory
from teimgr.errors import InstanceExists, InstanceNotFound, InvalidInstanceName, NotRunning, TeimgrError, Unavailable
from teimgr.launch.base import Adopted, Launcher
from teimgr.settings import Settings
from teimgr.spec import InstanceSpec, InstanceView, State, WorkerSpec

log = logging.getLogger(__name__)


class Metrics(ControlMetrics, Protocol):
    """What the manager counts."""

    def instance_created(self, spec: InstanceSpec) -> None:
        """A user created an instance."""

    def instance_deleted(self, name: str) -> None:
        """A user deleted an instance."""

    def fleet(self, views: Iterable[InstanceView]) -> None:
        """These are all the instances there are now."""


class Manager:
    """Owns the set of instances; each instance's supervisor owns that instance.

    Checks that a decision rests on and the decision itself happen without an await in between, so two calls cannot
    both have the last port. `booted` is set when the instances of before are known; the verbs wait for it.
    """

    def __init__(
        self,
        settings: Settings,
        launcher: Launcher,
        directory: Directory,
        store: Store,
        gpus: GpuInventory,
        metrics: Metrics,
        cores: int | None = None,
    ) -> None:
        self._settings = settings
        self._launcher = launcher
        self._directory = directory
        self._store = store
        self._gpus = gpus
        self._metrics = metrics
        self._planner = Planner(settings, gpus, cores or usable_cores())
        self._admission = Admission(settings)
        self._supervisors: dict[str, Supervisor] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._saving = asyncio.Lock()
        self._alarms: dict[str, str] = {}
        self.booted = asyncio.Event()
        self._refused: list[str] | None = None
        self._around = Surroundings(
            launcher=launcher,
            directory=directory,
            metrics=metrics,
            policy=policy_of(settings),
            probes=ProbePlan(settings.health_check_interval_secs, settings.health_probe_timeout_secs),
            grace_s=settings.graceful_shutdown_timeout_secs,
            changed=self._changed,
        )

    # The daemon's life

    async def restore(self) -> None:
        """Know the instances of before, and show them; nothing is looked for or started until `boot`.

        Raises:
            InvalidConfig: the launcher cannot use the run directory.
        """
        await self._launcher.start()
        wanted = await asyncio.to_thread(wanted_at_boot, self._settings, self._store)
        self._raise_alarm("load", wanted.alarm)
        self._refused = [name for spec in wanted.specs if (name := self._restore(spec))]

    async def boot(self) -> None:
        """Adopt live workers, begin to start the other instances that are wanted; `restore` comes first, if it has not.

        Connect routers to the directory when `booted` is set: adopted workers serve in it without a gap.

        Raises:
            InvalidConfig: the launcher cannot use the run directory.
        """
        if self._refused is None:
            await self.restore()
        self._planner.inventory = await self._gpus.read()
        adopted = await self._launcher.adopt(self._accepts)
        await self._begin({each.handle.spec.name: each for each in adopted}, self._refused or ())
        await self._save()

    async def _begin(self, adopted: Mapping[str, Adopted], refused: Collection[str]) -> None:
        for name in self._supervisors:
            self._supervise(name, adopted.get(name))
        await asyncio.gather(*(supervisor.started.wait() for supervisor in self._supervisors.values()))
        for name, supervisor in self._supervisors.items():
            if supervisor.spec.wanted_running and name not in adopted and name not in refused:
                await supervisor.accept(Start())
        self.booted.set()

    async def shutdown(self, *, at_once: bool = False) -> None:
        """Stop every worker in parallel; what is wanted stays as it is on disk.

        `at_once` gives them no grace, also where an earlier call did. After a boot that failed there may be none.
        """
        await asyncio.gather(*(self._halt(self._supervisors[name], at_once) for name in self._tasks))
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    # What users ask

    async def create(self, request: InstanceSpec) -> InstanceView:
        """A new instance, being started.

        Raises:
            InvalidInstanceName, ValidationError, InvalidConfig, InvalidGpuId, InvalidPort: the request is wrong.
            InstanceExists, PortConflict, MaxInstancesReached, PortAllocationFailed: it cannot be met.
        """
        await self.booted.wait()
        check_fields(request)
        await asyncio.to_thread(check_model, worker_spec(request, self._settings, gpu_uuid=None, threads=1))
        place(request, await self._gpus.read())
        spec = self._admission.admit(request, self._specs())
        spec = replace(spec, created_at=_now(), wanted_running=True)
        supervisor = self._enlist(spec)
        self._supervise(spec.name, None)
        await supervisor.accept(Start())
        await self._save()
        self._metrics.instance_created(spec)
        return supervisor.view()

    async def start(self, name: str) -> InstanceView:
        """Have it running; returns while it is starting.

        Raises:
            InstanceNotFound, AlreadyRunning.
        """
        return await self._command(name, Start())

    async def stop(self, name: str) -> InstanceView:
        """Have it stopped; returns when its process is gone. Nothing but a start brings it back.

        Raises:
            InstanceNotFound, NotRunning.
        """
        return await self._command(name, Stop())

    async def restart(self, name: str) -> InstanceView:
        """Have a new process; returns when the old one is gone and the new one is starting.

        Raises:
            InstanceNotFound.
        """
        return await self._command(name, Restart())

    async def delete(self, name: str) -> InstanceView:
        """Forget it; returns its last view when its process is gone. Its log file stays.

        Raises:
            InstanceNotFound.
        """
        await self.booted.wait()
        supervisor, task = self._find(name), self._tasks[name]
        await supervisor.accept(Delete())
        view = await supervisor.settle()
        await asyncio.wait({task})
        self._forget(supervisor)
        await self._save()
        self._metrics.instance_deleted(name)
        return view

    def list(self) -> list[InstanceView]:
        """All instances, in the order of their creation."""
        return [self._shown(supervisor) for supervisor in self._supervisors.values()]

    def get(self, name: str) -> InstanceView:
        """One instance.

        Raises:
            InstanceNotFound.
        """
        return self._shown(self._find(name))

    def _shown(self, supervisor: Supervisor) -> InstanceView:
        """Its view; until the boot is over nobody knows that an instance that is wanted has no worker."""
        view = supervisor.view()
        if self.booted.is_set() or not view.spec.wanted_running or view.state is not State.STOPPED:
            return view
        return replace(view, state=State.STARTING)

    # Instances and their supervisors

    def _find(self, name: str) -> Supervisor:
        try:
            return self._supervisors[name]
        except KeyError:
            raise InstanceNotFound(name) from None

    def _specs(self) -> Sequence[InstanceSpec]:
        return [supervisor.spec for supervisor in self._supervisors.values()]

    def _enlist(self, spec: InstanceSpec) -> Supervisor:
        supervisor = Supervisor(spec, lambda: self._plan(spec), self._around)
        self._supervisors[spec.name] = supervisor
        return supervisor

    def _restore(self, spec: InstanceSpec) -> str | None:
        """Enlist what was wanted before; its name when it cannot be tried, which its view explains."""
        try:
            self._enlist(self._admission.readmit(spec, self._specs()))
        except (InvalidInstanceName, InstanceExists) as error:
            self._raise_alarm("load", f"not restored: {error.message}")
        except TeimgrError as error:
            self._enlist(spec).give_up(error.message)
            return spec.name
        return None

    def _supervise(self, name: str, adopted: Adopted | None) -> None:
        task = asyncio.create_task(self._supervisors[name].run(adopted), name=f"supervisor of {name}")
        task.add_done_callback(_report_defect)
        self._tasks[name] = task

    def _forget(self, supervisor: Supervisor) -> None:
        name = supervisor.spec.name
        if self._supervisors.get(name) is supervisor:
            del self._supervisors[name], self._tasks[name]
            self._planner.forget(name)
            self._changed()

    async def _command(self, name: str, command: Command) -> InstanceView:
        await self.booted.wait()
        supervisor = self._find(name)
        await supervisor.accept(command)
        await self._save()
        return await supervisor.settle()

    async def _halt(self, supervisor: Supervisor, at_once: bool) -> None:
        """Stop one for the daemon's sake, wanted or not."""
        with suppress(NotRunning, InstanceNotFound, Unavailable):
            await supervisor.accept(Stop(), wanted_stays=True)
        if at_once:
            supervisor.hurry()
        await supervisor.settle()

    # Plans

    async def _plan(self, spec: InstanceSpec) -> WorkerSpec:
        starting = [name for name, each in self._supervisors.items() if each.state is State.STARTING]
        return await self._planner.plan(spec, self._alive(), starting)

    def _accepts(self, found: WorkerSpec) -> bool:
        supervisor = self._supervisors.get(found.name)
        wanted = supervisor is not None and supervisor.spec.wanted_running
        return supervisor is not None and wanted and self._planner.accepts(supervisor.spec, found)

    def _alive(self) -> Sequence[InstanceSpec]:
        """The instances that have or are about to have a worker."""
        alive = (State.STARTING, State.RUNNING)
        return [each.spec for each in self._supervisors.values() if each.state in alive]

    # State and figures

    async def _save(self) -> None:
        """Have the disk say what is wanted now. A disk that refuses is an alarm; the fleet goes on."""
        async with self._saving:
            try:
                await asyncio.to_thread(self._store.save, self._specs())
            except OSError as error:
                self._raise_alarm("save", f"the state cannot be saved: {error}")
            else:
                self._alarms.pop("save", None)

    @property
    def store_alarm(self) -> str | None:
        """What people must know of the state file; None when all is well."""
        return "; ".join(self._alarms.values()) or None

    def _raise_alarm(self, kind: str, text: str | None) -> None:
        if text is not None:
            log.error("state alarm", extra={"reason": text})
            self._alarms[kind] = "; ".join(filter(None, (self._alarms.get(kind), text))) if kind == "load" else text

    def _changed(self) -> None:
        """Some instance is not what it was: figures, and perhaps everybody's share of the CPU."""
        self._metrics.fleet(self.list())
        for name, threads in self._planner.shares(self._alive()).items():
            self._supervisors[name].set_threads(threads)


def _report_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.critical("supervisor ended by a defect", exc_info=error, extra={"task": task.get_name()})


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
