"""The only door to the instances: what is wanted, under which name, on which port, and what to tell its workers."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from teimgr.clock import now_rfc3339
from teimgr.config.rules import check_instance
from teimgr.config.settings import Settings
from teimgr.directory import Directory
from teimgr.errors import InstanceExists, InstanceNotFound, InvalidInstanceName, NotRunning, TeimgrError, Unavailable
from teimgr.launch.launcher import Adopted, Launcher
from teimgr.observability.metrics import Metrics
from teimgr.placement.gpus import GpuInventory
from teimgr.placement.planner import Others, Planner, place, usable_cores, with_batch_tokens, worker_spec
from teimgr.spec import Change, InstanceSpec, InstanceView, State, WorkerSpec
from teimgr.supervision.instance import ManagedInstance, change_needed, with_changes
from teimgr.supervision.lifecycle_events import Command, Delete, Restart, Start, Stop
from teimgr.supervision.store import Store, wanted_at_boot
from teimgr.supervision.supervisor import Supervisor, SupervisorContext, policy_of
from teimgr.supervision.validation import InstanceValidator, check_model
from teimgr.supervision.worker_run import ProbePlan

log = logging.getLogger(__name__)


class Manager:
    """Owns the set of instances; each instance owns its workers' supervisors.

    Checks that a decision rests on and the decision itself happen without an await in between, so two calls cannot
    both have the last port. `booted` is set when the instances of before are known; the verbs wait for it. `noticed`
    is called with all views at every change.
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
        self._admission = InstanceValidator(settings)
        self._instances: dict[str, ManagedInstance] = {}
        self._saving = asyncio.Lock()
        self._alarms: dict[str, str] = {}
        self.tokens_per_gib = settings.auto_max_batch_tokens_per_gib  # a reload of the configuration changes it
        self.booted = asyncio.Event()
        self._refused: list[str] | None = None
        self.noticed: Callable[[Sequence[InstanceView]], None] = lambda views: None
        self._around = SupervisorContext(
            launcher=launcher,
            directory=directory,
            metrics=metrics,
            policy=policy_of(settings),
            probes=ProbePlan(settings.health_check_interval_secs, settings.health_probe_timeout_secs),
            grace_s=settings.graceful_shutdown_timeout_secs,
            on_fleet_changed=self._on_fleet_changed,
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
        if any(not spec.max_batch_tokens for spec in wanted.specs):
            await self._planner.look()  # for them alone: slow drivers need not hold up the listeners
        self._refused = [name for spec in wanted.specs if (name := self._restore(spec))]

    async def boot(self) -> None:
        """Adopt live workers, begin to start the other instances that are wanted; `restore` comes first, if it has not.

        Connect routers to the directory when `booted` is set: adopted workers serve in it without a gap.

        Raises:
            InvalidConfig: the launcher cannot use the run directory.
        """
        if self._refused is None:
            await self.restore()
        await self._planner.look()
        found: defaultdict[str, dict[int, Adopted]] = defaultdict(dict)
        for each in await self._launcher.adopt(self._accepts):
            found[each.handle.spec.name][each.handle.spec.replica] = each
        await self._begin(found, self._refused or ())
        await self._save()

    async def _begin(self, adopted: Mapping[str, Mapping[int, Adopted]], refused: Collection[str]) -> None:
        for name, instance in self._instances.items():
            await instance.begin(self._planner.replicas(instance.spec), adopted.get(name, {}))
        for name, instance in self._instances.items():
            if instance.spec.wanted_running and name not in refused:
                await instance.start_missing()
        self.booted.set()

    async def shutdown(self, *, at_once: bool = False) -> None:
        """Stop every worker in parallel; what is wanted stays as it is on disk.

        `at_once` gives them no grace, also where an earlier call did. After a boot that failed there may be none.
        """
        begun = [instance for instance in self._instances.values() if instance.is_supervised]
        await asyncio.gather(*(self._halt(instance, at_once) for instance in begun))
        if tasks := [task for instance in self._instances.values() for task in instance.close()]:
            await asyncio.wait(tasks)

    # What users ask

    async def create(self, request: InstanceSpec) -> InstanceView:
        """A new instance, being started.

        Raises:
            InvalidInstanceName, ValidationError, InvalidConfig, InvalidGpuId, InvalidPort: the request is wrong.
            InstanceExists, PortConflict, MaxInstancesChangeed, PortAllocationFailed: it cannot be met.
        """
        await self.booted.wait()
        check_instance(request)
        await asyncio.to_thread(check_model, worker_spec(request, self._settings, gpu_uuid=None, threads=1))
        request = with_batch_tokens(request, await self._planner.look(), self.tokens_per_gib)
        place(request, self._planner.inventory)
        spec = self._admission.admit(request, self._specs())
        spec = replace(spec, created_at=now_rfc3339(), wanted_running=True)
        instance = self._enlist(spec)
        await instance.begin(self._planner.replicas(spec), {})
        await instance.accept(Start())
        await self._save()
        self._metrics.instance_created(spec)
        return instance.view()

    async def update(
        self, name: str, changes: Mapping[str, Any], *, recreate: bool = False, wait: bool = False
    ) -> InstanceView:
        """Change what is wanted, and begin to have it: keys of `InstanceSpec`, None for a key's default.

        Where workers have to be told something else, new ones start beside the old ones, and take over once all have
        proved themselves; with `recreate` the old ones end first. When a new one fails, all is as before, and the
        view's `update` says why. With `wait` this returns when it is over.

        Raises:
            InstanceNotFound, UpdateInProgress.
            ValidationError, InvalidConfig, InvalidGpuId: the changes are wrong; nothing was begun.
            UpdateFailed: it failed, and `wait` was asked for.
        """
        await self.booted.wait()
        instance = self._find(name)
        wanted = with_changes(instance.spec, changes)
        check_instance(wanted)
        await asyncio.to_thread(check_model, worker_spec(wanted, self._settings, gpu_uuid=None, threads=1))
        place(wanted, await self._planner.look())
        if not wanted.max_batch_tokens:
            chosen = with_batch_tokens(wanted, self._planner.inventory, self.tokens_per_gib)
            changes = {**changes, "max_batch_tokens": chosen.max_batch_tokens}

        def make(present: InstanceSpec) -> tuple[InstanceSpec, int, Change]:
            spec = with_changes(present, changes)
            return spec, self._planner.replicas(spec), change_needed(present, spec, self._settings)

        await instance.change(make, tuple(sorted(changes)), recreate=recreate)
        return await self._after_change(instance, wait)

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

    async def restart(self, name: str, *, rolling: bool = False, wait: bool = False) -> InstanceView:
        """Have new processes; returns when the old ones are gone and the new ones are starting.

        A `rolling` one is an `update` without changes: nothing is lost, and `wait` means what it does there. Where it
        is not wanted running there is nothing to lose, and it is started as by the other kind.

        Raises:
            InstanceNotFound.
            UpdateInProgress, UpdateFailed: as `update`.
        """
        await self.booted.wait()
        instance = self._find(name)
        if not rolling or not instance.spec.wanted_running:
            return await self._command(name, Restart())
        await self._planner.look()
        await instance.change(
            lambda spec: (spec, self._planner.replicas(spec), Change.REPLACE), keys=(), recreate=False
        )
        return await self._after_change(instance, wait)

    async def delete(self, name: str) -> InstanceView:
        """Forget it; returns its last view when its process is gone. Its log file stays.

        Raises:
            InstanceNotFound.
        """
        await self.booted.wait()
        instance = self._find(name)
        await instance.accept(Delete())
        view = await instance.settle()
        await instance.gone()
        self._forget(instance)
        await self._save()
        self._metrics.instance_deleted(name)
        return view

    def list(self) -> list[InstanceView]:
        """All instances, in the order of their creation."""
        return [self._shown(instance) for instance in self._instances.values()]

    def get(self, name: str) -> InstanceView:
        """One instance.

        Raises:
            InstanceNotFound.
        """
        return self._shown(self._find(name))

    def _shown(self, instance: ManagedInstance) -> InstanceView:
        """Its view; until the boot is over nobody knows that an instance that is wanted has no worker."""
        view = self._with_cards(instance.view())
        if self.booted.is_set() or not view.spec.wanted_running or view.state is not State.STOPPED:
            return view
        return replace(view, state=State.STARTING)

    def _with_cards(self, view: InstanceView) -> InstanceView:
        index_of = self._planner.index_of
        return replace(view, workers=tuple(replace(each, gpu_id=index_of(each.gpu)) for each in view.workers))

    # Instances

    def _find(self, name: str) -> ManagedInstance:
        try:
            return self._instances[name]
        except KeyError:
            raise InstanceNotFound(name) from None

    def _specs(self) -> Sequence[InstanceSpec]:
        return [instance.spec for instance in self._instances.values()]

    def _enlist(self, spec: InstanceSpec) -> ManagedInstance:
        instance = ManagedInstance(spec, self._planner.replicas(spec), self._plan, self._save, self._around)
        self._instances[spec.name] = instance
        return instance

    def _restore(self, spec: InstanceSpec) -> str | None:
        """Enlist what was wanted before; its name when it cannot be tried, which its view explains."""
        try:
            spec = with_batch_tokens(spec, self._planner.inventory, self.tokens_per_gib)
            self._enlist(self._admission.readmit(spec, self._specs()))
        except (InvalidInstanceName, InstanceExists) as error:
            self._raise_alarm("load", f"not restored: {error.message}")
        except TeimgrError as error:
            self._enlist(spec).give_up(error.message)
            return spec.name
        return None

    def _forget(self, instance: ManagedInstance) -> None:
        name = instance.spec.name
        if self._instances.get(name) is instance:
            del self._instances[name]
            instance.forget()
            self._on_fleet_changed()

    async def _command(self, name: str, command: Command) -> InstanceView:
        await self.booted.wait()
        instance = self._find(name)
        await instance.accept(command)
        await self._save()
        return self._with_cards(await instance.settle())

    async def _after_change(self, instance: ManagedInstance, wait: bool) -> InstanceView:
        if wait:
            await instance.update_finished()
        return self._shown(instance)

    async def _halt(self, instance: ManagedInstance, at_once: bool) -> None:
        """Stop one for the daemon's sake, wanted or not."""
        if at_once:
            instance.hurry()
        with suppress(NotRunning, InstanceNotFound, Unavailable):
            await instance.accept(Stop(), wanted_stays=True)
        if at_once:
            instance.hurry()
        await instance.settle()

    # Plans

    async def _plan(self, supervisor: Supervisor) -> WorkerSpec:
        """The orders for the next worker of one replica, which from now on has its place."""
        await self._planner.look()
        spec = supervisor.spec
        starting = [each.gpu for each in self._supervisors(State.STARTING) if each is not supervisor]
        mates = [each.gpu for each in self._instances[spec.name].mates(supervisor)]
        others = Others(self._alive(), _count(starting), _count(mates))
        order = self._planner.plan(spec, supervisor.number, others)
        supervisor.gpu = order.gpu
        return order

    def _accepts(self, found: WorkerSpec) -> bool:
        instance = self._instances.get(found.name)
        wanted = instance is not None and instance.spec.wanted_running
        return instance is not None and wanted and self._planner.accepts(instance.spec, found)

    def _supervisors(self, *states: State) -> Sequence[Supervisor]:
        """Those in one of the states, of all instances."""
        everybody = (each for instance in self._instances.values() for each in instance.supervisors)
        return [each for each in everybody if each.state in states]

    def _alive(self) -> Sequence[InstanceSpec]:
        """The specs of the workers that there are or are about to be."""
        return [each.spec for each in self._supervisors(State.STARTING, State.RUNNING)]

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

    def _on_fleet_changed(self) -> None:
        """Some instance is not what it was: figures, and perhaps everybody's share of the CPU."""
        views = self.list()
        self._metrics.fleet(views)
        self.noticed(views)
        for name, threads in self._planner.shares(self._alive()).items():
            self._instances[name].set_threads(threads)


def _count(gpus: Iterable[str | None]) -> Counter[str]:
    return Counter(gpu for gpu in gpus if gpu is not None)
