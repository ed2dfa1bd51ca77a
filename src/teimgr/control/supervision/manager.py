"""Manager of the instances: validates requests, supervises workers, adopts those of an earlier daemon."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Container, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from teimgr.config.instance_keys import check_allowed, check_instance
from teimgr.config.sections import allows
from teimgr.config.settings import Settings
from teimgr.control.background import CommandTurns
from teimgr.control.events.fleet_events import EventLog
from teimgr.control.launch.launcher import Launcher, WorkerHandle
from teimgr.control.launch.strays import Sweep
from teimgr.control.ledger.admission import Admission
from teimgr.control.placement.dry_run import RUNS, WAITS, FleetPlan, PlannedWorker
from teimgr.control.placement.hosts import InventorySource, LeavingHosts
from teimgr.control.placement.planner import Planner, place, usable_cores, with_batch_tokens, worker_spec
from teimgr.control.residence.policy import Rehearsal
from teimgr.control.sharing.places import Grant, Made, Tries, grant, left_for_calls
from teimgr.control.supervision.crash_reports import Crash, CrashReports
from teimgr.control.supervision.fleet_plan import HostDepartures, Planning, Rebalancer
from teimgr.control.supervision.fleet_records import FleetRecords
from teimgr.control.supervision.instance import ManagedInstance
from teimgr.control.supervision.lifecycle import Backoff, Command, RestartPolicy
from teimgr.control.supervision.store import Store, WantedState
from teimgr.control.supervision.supervisor import SupervisorContext
from teimgr.control.supervision.validation import InstanceValidator, Present, check_model, with_changes
from teimgr.control.supervision.worker_run import ProbePlan, Usage
from teimgr.errors import (
    Code,
    InstanceExists,
    InstanceNotFound,
    Internal,
    InvalidConfig,
    InvalidInstanceName,
    MaxInstancesReached,
    NotRunning,
    Overloaded,
    PortAllocationFailed,
    TeimgrError,
    Unavailable,
)
from teimgr.files import code_id
from teimgr.observability import catalogue
from teimgr.observability.logs import remove_logs, set_log_aside
from teimgr.observability.metrics import DaemonMetrics
from teimgr.spec import (
    A_CALL,
    MADE_BY,
    MADE_FOR,
    Change,
    Incident,
    InstanceSpec,
    InstanceView,
    State,
    WorkerSpec,
    now_rfc3339,
    other_space,
)
from teimgr.wire.routing.directory import Directory

log = logging.getLogger(__name__)

_NAME_CHARS = 64
_NO_PLACE_RETRY_S = 10.0
# Callers of inference get these codes unchanged, as for an unknown model name.
_UNAVAILABLE_MODEL_CODES = (Code.MODEL_NOT_FOUND, Code.MODEL_GATED)
_MAX_DELETED_SERIES = 1000
ADOPTION_LIMIT_S = 2.0
"""Limit of the start's wait for workers of an earlier daemon. Workers that answer later are still adopted."""
_LOG_LIMIT_S = 10.0
_BACKGROUND_LIMIT_S = 5.0  # at shutdown, for crash reports and the last writes of updates


class Manager:
    """Owns the instances: `restore` and `boot` bring back those of the state file; REST calls the other methods.

    No await separates a check from the decision based on it, so two calls cannot both get the last port. Commands on
    one name run in turn, a deletion until the processes are gone. A command is completed even if its caller leaves.

    `booted` is set when workers of an earlier daemon are adopted, or after `ADOPTION_LIMIT_S`. Commands wait for it,
    and for late workers of the same instance. `leaving` names hosts whose workers have to move.
    """

    def __init__(
        self,
        settings: Settings,
        launcher: Launcher,
        directory: Directory,
        store: Store,
        gpus: InventorySource,
        metrics: DaemonMetrics,
        cores: int | None = None,
        events: EventLog | None = None,
        leaving: LeavingHosts | None = None,
    ) -> None:
        self.tokens_per_gib = settings.auto_max_batch_tokens_per_gib
        self.booted = asyncio.Event()
        self._settings = settings
        self._launcher = launcher
        self._directory = directory
        self._planner = Planner(settings, gpus, cores or usable_cores())
        self._validator = InstanceValidator(settings)
        self._instances: dict[str, ManagedInstance] = {}
        self._state = WantedState(store, lambda: [instance.spec for instance in self._instances.values()])
        self.is_restored = False
        """True once this daemon owns the state file and the run directory and has listed its instances."""
        self._adopting: set[asyncio.Task[None]] = set()
        self._of_other_code: dict[str, set[str]] = {}  # incarnations of adopted workers by instance
        self._is_shutting_down = False
        self._background: set[asyncio.Task[None]] = set()
        self._turns = CommandTurns()
        self._declaring = asyncio.Lock()
        self._tries = Tries()
        self._planning = Planning(self._planner, self._instances, lambda: self.tokens_per_gib)
        self._rebalancer = Rebalancer(self._planner, self._instances)
        self._sweep = Sweep(launcher.strays, self._owned)
        self._not_startable: set[str] = set()
        self._departures = HostDepartures(self._instances, self.booted, self._in_background)
        if leaving is not None:
            leaving.subscribe(self._leave_host)
        crash_reports = CrashReports(settings.log_dir / "crashes")
        self._deleted: dict[str, None] = {}  # newest last
        self._records = FleetRecords(self._planner, events or EventLog(), metrics, crash_reports)
        self._context = SupervisorContext(
            policy=RestartPolicy(
                startup_timeout_s=settings.startup_timeout_secs,
                max_probe_failures=settings.max_failures_before_restart,
                backoff=Backoff(first_s=settings.restart_backoff_secs, max_s=settings.restart_backoff_max_secs),
            ),
            probes=ProbePlan(settings.health_check_interval_secs, settings.health_probe_timeout_secs),
            grace_s=settings.graceful_shutdown_timeout_secs,
            launcher=launcher,
            planner=self._planner,
            records=self._records,
        )

    # Start and stop of the daemon

    async def restore(self) -> None:
        """Read the state file and list its instances; workers are adopted and started by `boot`.

        Raises:
            InvalidConfig: the run directory or the state file cannot be used, for instance because another daemon uses
            it.
        """
        specs = await self._state.load(self._settings)
        await asyncio.to_thread(self._planner.memory.footprints.load)
        await self._launcher.start()
        if any(not spec.max_batch_tokens for spec in specs):
            await self._planner.refresh()  # skipped if not needed: GPU drivers can be slow
        present = Present()
        for spec in specs:
            self._restore(spec, present)
        self.is_restored = True

    async def boot(self) -> None:
        """Adopt live workers and begin to start missing ones; runs `restore` first if it has not run.

        Connect muxes after `adoption_over`.

        Raises:
            InvalidConfig: the launcher cannot use the run directory.
        """
        if not self.is_restored:
            await self.restore()
        await self._planner.refresh()
        found = await self._launcher.find()
        for ended in found.ended:
            if instance := self._instances.get(ended.instance):
                incident, writing = self._records.crashed(Crash.unseen(ended))
                self._in_background(writing, f"crash report of {ended.instance}")
                instance.on_incident(incident)
        alive: defaultdict[str, list[WorkerHandle]] = defaultdict(list)
        for worker in found.alive:
            alive[worker.spec.name].append(worker)
        names = {**self._instances, **alive}
        self._adopting = {asyncio.create_task(self._take_over(name, alive[name])) for name in names}
        self._sweep.begin(after=self.adoption_over)
        if self._adopting:  # an unresponsive worker must not delay the others
            done, _ = await asyncio.wait(self._adopting, timeout=ADOPTION_LIMIT_S)
            for task in done:
                task.result()
        self.booted.set()
        for name in self._state.unfinished:
            resuming = self._resume_update(name, self._instances.get(name))
            self._in_background(resuming, f"update of {name}, begun again")
        await self._state.write_quietly()

    async def adoption_over(self) -> None:
        """Return when each worker of an earlier daemon has answered or has used up its time.

        Muxes are connected after this. Until this daemon's first snapshot they use the routes they have, so a worker
        that answers late loses no call.
        """
        if self._adopting:
            await asyncio.wait(self._adopting)

    async def _take_over(self, name: str, workers: Sequence[WorkerHandle]) -> None:
        """Adopt the workers of one instance, start those that are missing, end the others."""
        instance = self._instances.get(name)  # it may have been replaced during the adoption
        try:
            adopted = await self._launcher.adopt(workers, self._accepts) if workers else []
        except Exception:  # the sweep ends workers that were not adopted
            log.exception("workers of an earlier daemon not adopted", extra={"instance": name})
            adopted = []
        if others := {each.handle.incarnation for each in adopted if each.status.build != code_id()}:
            self._of_other_code[name] = others
        if instance is not None:
            start = instance.spec.load == "eager" and instance.spec.wanted_running and name not in self._not_startable
            await instance.begin({each.handle.spec.replica: each for each in adopted}, start=start)

    async def renew_workers(self) -> None:
        """Replace the adopted workers that run other code than this daemon, one by one and without a gap.

        A worker that cannot be replaced, for instance for lack of memory for two, keeps serving.
        """
        await self.adoption_over()
        for name, incarnations in self._of_other_code.items():
            if (instance := self._instances.get(name)) is None:
                continue
            log.info("replacing workers of another version", extra={"instance": name, "workers": len(incarnations)})
            try:
                await self._planner.refresh()
                await instance.renew(incarnations)
            except TeimgrError as error:
                facts = {"instance": name, "reason": error.message}
                log.warning("worker of another version not replaced; it keeps serving", extra=facts)
        self._of_other_code.clear()

    async def shutdown(self, *, within_s: float | None = None, at_once: bool = False) -> None:
        """Stop every worker in parallel; the desired state on disk stays. Also works after a failed boot.

        `within_s` shortens the grace; `at_once` kills them without grace, even if an earlier call allowed some.
        """
        await self._begin_end()
        supervised = [instance for instance in self._instances.values() if instance.is_supervised]
        stopping = asyncio.gather(*(self._shut_down(instance, at_once) for instance in supervised))
        if within_s is not None:
            done, _ = await asyncio.wait({stopping}, timeout=within_s)
            for instance in () if done else supervised:
                instance.force_stop()
        await stopping
        await self._turns.ended(_BACKGROUND_LIMIT_S)
        # A start in progress may have added supervisors since the list was made.
        late = [each for each in self._instances.values() if each.is_supervised and each not in supervised]
        await asyncio.gather(*(self._shut_down(instance, at_once=True) for instance in late))
        await self._end_supervision(_BACKGROUND_LIMIT_S)

    async def release(self) -> None:
        """End, and leave every worker running: the next daemon adopts them, and resumes interrupted updates.

        The last write of the state has no time limit: a late one would replace what the next daemon writes.
        """
        await self._begin_end()
        await asyncio.gather(*(instance.give_up_update(_BACKGROUND_LIMIT_S) for instance in self._instances.values()))
        await self._turns.ended(_BACKGROUND_LIMIT_S)
        await self._end_supervision(None)

    async def _begin_end(self) -> None:
        """Refuse commands and starts from now on."""
        self._is_shutting_down = True
        self._turns.close()
        await self.adoption_over()
        await self._sweep.end()
        for instance in self._instances.values():
            instance.accepts_no_more_starts()

    async def _end_supervision(self, state_limit_s: float | None) -> None:
        """Leave the processes running, end background work, and release the state file."""
        if tasks := [task for instance in self._instances.values() for task in instance.close()]:
            await asyncio.wait(tasks)
        if self._background:  # they may write the state file
            _, late = await asyncio.wait(self._background, timeout=_BACKGROUND_LIMIT_S)
            for task in late:
                log.error("background task did not finish before the daemon's end", extra={"task": task.get_name()})
        self._planning.close()
        await self._planner.memory.footprints.close()
        await self._state.close(state_limit_s)

    async def _shut_down(self, instance: ManagedInstance, at_once: bool) -> None:
        if at_once:
            instance.force_stop()
        with suppress(NotRunning, InstanceNotFound, Unavailable):
            await instance.accept(Command.STOP, keep_wanted=True)
        if at_once:
            instance.force_stop()
        await instance.settle()

    def _restore(self, spec: InstanceSpec, present: Present) -> None:
        """List an instance of the state file after the others; as failed if it cannot start as it is."""
        try:
            spec = with_batch_tokens(spec, self._planner.inventory, self.tokens_per_gib)
            present.add(self._add(self._validator.readmit(spec, present)).spec)
        except (InvalidInstanceName, InstanceExists) as error:
            self._state.add_alarm(f"not restored: {error.message}")
        except TeimgrError as error:
            self._add(spec).mark_failed(error.message)
            self._not_startable.add(spec.name)
            present.add(spec)

    def _accepts(self, found: WorkerSpec) -> bool:
        instance = self._instances.get(found.name)
        if instance is None or not instance.spec.wanted_running:
            return False
        return self._planner.accepts(instance.spec, found)

    # Commands

    async def create(self, request: InstanceSpec) -> InstanceView:
        """Add an instance and begin to start it.

        Raises:
            InvalidInstanceName, ValidationError, InvalidConfig, InvalidGpuId, InvalidPort: the request is wrong.
            InstanceExists, PortConflict, MaxInstancesReached, PortAllocationFailed: it conflicts with other instances.
            StateNotSaved: the disk refused; the instance was not created.
        """
        return await self._turns.carry_out(self._create(request), f"creation of {request.name}")

    async def _create(self, request: InstanceSpec) -> InstanceView:
        spec = self._validator.admit(await self._completed(request), Present(self._state.specs()))
        return await self._begin(replace(spec, created_at=now_rfc3339(), wanted_running=True))

    async def _completed(self, request: InstanceSpec) -> InstanceSpec:
        """Return a request that is valid alone and with the present cards, completed with its batch tokens."""
        await self.booted.wait()
        await self._check(request)
        request = with_batch_tokens(request, await self._planner.refresh(), self.tokens_per_gib)
        place(request, self._planner.inventory)
        return request

    async def _begin(self, spec: InstanceSpec) -> InstanceView:
        """Write an admitted instance to the state file and add it; start it unless it was stopped or waits for a
        call."""
        async with self._state.creating(spec):
            self._turns.require_open()
            self._records.ordered(spec.name)
            instance = self._add(spec)
            await instance.begin({}, start=spec.load == "eager" and spec.wanted_running)
        self._records.metrics.count(catalogue.CREATED, spec.name, spec.model_id)
        view = instance.view()
        same = (each.view() for each in self._instances.values() if each.spec.model_id == spec.model_id)
        if (first := other_space(view, same)) is not None:
            log.warning(
                "calls by model id go to an instance of another embedding space",
                extra={"instance": spec.name, "space_of": first},
            )
        return view

    async def recreate(self, request: InstanceSpec) -> InstanceView:
        """Delete an instance and create it again with keys that no update can change; unchanged if that is refused.

        A refusal after the deletion, such as a port that another program has just taken, restores the old instance.

        Raises:
            InstanceNotFound, and what `create` does.
        """
        return await self._turns.carry_out(self._recreate(request), f"recreation of {request.name}")

    async def _recreate(self, request: InstanceSpec) -> InstanceView:
        request, old = await self._completed(request), self._find(request.name).spec
        others = [spec for spec in self._state.specs() if spec.name != old.name]
        self._validator.check_admission(request, Present(others), own=(old.port, old.prometheus_port))
        await self.delete(old.name)
        try:
            return await self._create(request)
        except TeimgrError as error:
            log.error(
                "recreation failed; restoring the old instance", extra={"instance": old.name, "reason": error.message}
            )
            try:
                await self._begin(self._validator.readmit(old, Present(self._state.specs())))
            except TeimgrError as second:
                error.reword(f"{error.message}; the old instance could not be restored: {second.message}")
            raise

    async def plan(self, wanted: Sequence[InstanceSpec] | None = None) -> FleetPlan:
        """Return what would happen if these instances were created or started in order; None: those that should run.

        Raises:
            InvalidInstanceName, ValidationError, InvalidConfig, InvalidGpuId: one of them is wrong.
        """
        await self.booted.wait()
        for spec in wanted or ():
            await self._check(spec)
        return await self._planning.plan(self._planning.to_start() if wanted is None else wanted)

    async def carry_out(self, wanted: Sequence[InstanceSpec]) -> FleetPlan:
        """Carry out `plan` for these instances: create or start each in order, once the one before has its place.

        Return what happened; an instance with a worker that waits for others' calls is not waited for.

        Raises:
            What `create` and `start` do; the instances before it stay.
        """
        planned = await self.plan(wanted)
        kept = [worker for worker in planned.workers if worker.outcome == RUNS]
        waiting = {worker.instance for worker in planned.workers if worker.outcome == WAITS}
        with self._planning.recording() as evicted:
            happened = [each for spec in wanted for each in await self._carry_out_one(spec, kept, waiting)]
        return replace(planned, workers=tuple(happened), evictions=tuple(evicted))

    async def _carry_out_one(
        self, spec: InstanceSpec, kept: Sequence[PlannedWorker], waiting: Collection[str]
    ) -> list[PlannedWorker]:
        if found := [worker for worker in kept if worker.instance == spec.name]:
            return found
        if spec.name in self._instances:
            await self.start(spec.name)
        else:
            await self.create(spec)
        with self._records.watching(spec.name) as changed:
            while spec.name not in waiting and not self._planning.is_placed(spec.name):
                changed.clear()
                await changed.wait()
        return self._planning.happened(spec.name)

    async def rebalance(self, *, dry_run: bool = False) -> dict[str, Any]:
        """Move workers to better places, without a gap; with `dry_run` only report. Reports what stays, and why.

        The moves go on if the caller leaves.
        """
        await self.booted.wait()
        if dry_run:
            return self._rebalancer.described(await self._rebalancer.plan())
        moving = self._turns.carry_out(self._rebalancer.carry_out(), "rebalancing")
        return self._rebalancer.described(await moving)

    def plan_evictions_by(self, rehearsal: Callable[[], Awaitable[Rehearsal]]) -> None:
        """Let plans list evictions, by a rehearsal of the policy that evicts."""
        self._planning.rehearse_by(rehearsal)

    async def update(
        self, name: str, changes: Mapping[str, Any], *, recreate: bool = False, wait: bool = False
    ) -> InstanceView:
        """Begin to change fields of the spec, without a gap in service; None resets a field to its default.

        If the change matters to workers, new ones start beside the old ones and take over when all are ready; with
        `recreate` the old ones end first. If a new one fails, everything is rolled back, and the view's `update` has
        the reason. With `wait` this returns when the update is over.

        Raises:
            InstanceNotFound, UpdateInProgress.
            ValidationError, InvalidConfig, InvalidGpuId: the changes are wrong; nothing was begun.
            StateNotSaved: the disk refused; nothing was changed.
            UpdateFailed: it failed, with `wait`.
        """
        instance = await self._adopted_instance(name)
        ended = await self._turns.carry_out(self._update(instance, changes, recreate), f"update of {name}")
        if wait:
            if ended is not None:
                await asyncio.wait({ended})
            await instance.update_finished()
        return instance.view()

    async def _update(
        self, instance: ManagedInstance, given: Mapping[str, Any], recreate: bool
    ) -> asyncio.Task[None] | None:
        """Begin an update. For one that starts workers, return a task that ends when the end is written."""
        if self._state.is_refused:
            await self._state.write()  # refuse before workers start for a change that cannot be saved
        await self._check(with_changes(instance.spec, given))
        await self._planner.refresh()
        async with self._turns.of(instance.spec.name):
            self._require_present(instance)
            changes, wanted = given, with_changes(instance.spec, given)
            self._check_keys(wanted)  # another update may have changed other keys since the first check
            place(wanted, self._planner.inventory)
            if not wanted.max_batch_tokens:
                chosen = with_batch_tokens(wanted, self._planner.inventory, self.tokens_per_gib)
                changes = {**changes, "max_batch_tokens": chosen.max_batch_tokens}
            self._records.ordered(instance.spec.name)
            needed = self._planner.change_needed(instance.spec, with_changes(instance.spec, changes))
            if needed is not Change.IN_PLACE and instance.is_to_run:
                return await self._begin_update(instance, given, changes, recreate)
            was_unloaded = instance.state is State.UNLOADED
            await instance.update(changes, recreate=recreate)
            if was_unloaded and instance.spec.load == "eager":
                await instance.accept(Command.START)
            return None

    async def _begin_update(
        self, instance: ManagedInstance, given: Mapping[str, Any], changes: Mapping[str, Any], recreate: bool
    ) -> asyncio.Task[None]:
        """Write that the update was accepted, then begin it: the next daemon completes it if this one dies."""
        name = instance.spec.name
        record = await self._state.begin_update(name, given, recreate=recreate)
        try:
            await instance.update(changes, recreate=recreate)
        except BaseException:
            await self._state.end_update(name, record)
            raise
        return self._in_background(self._until_updated(instance, record), f"update of {name}")

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _until_updated(self, instance: ManagedInstance, record: str) -> None:
        with suppress(TeimgrError):
            await instance.update_finished()
        if not self._is_shutting_down:  # otherwise the next daemon resumes it
            await self._state.end_update(instance.spec.name, record)

    async def _resume_update(self, name: str, instance: ManagedInstance | None) -> None:
        """Resume an update that was interrupted by a daemon's end; give up if that happened too often."""
        try:
            async with self._state.resuming(name) as (changes, recreate):
                log.info("resuming an interrupted update", extra={"instance": name, "changes": sorted(changes)})
                if instance is None:
                    raise InstanceNotFound(name)
                await instance.adoption_over()
                await self._turns.carry_out(self._update(instance, changes, recreate), f"update of {name}")
        except (TeimgrError, ValueError, KeyError, TypeError) as error:
            self._state.add_alarm(f"the interrupted update of '{name}' was not resumed: {error}")

    async def start(self, name: str) -> InstanceView:
        """Begin to start an instance.

        Raises:
            InstanceNotFound, AlreadyRunning.
        """
        return await self._command(name, Command.START)

    async def stop(self, name: str) -> InstanceView:
        """Stop an instance until it is started again; returns when its processes are gone.

        Raises:
            InstanceNotFound, NotRunning.
        """
        return await self._command(name, Command.STOP)

    async def load(self, name: str) -> None:
        """Begin to start an on-demand instance that is unloaded; no effect in another state.

        Raises:
            InstanceNotFound.
            Unavailable: the daemon is ending.
        """
        instance = await self._adopted_instance(name)
        await self._turns.carry_out(self._load(instance), f"load of {name}")

    async def _load(self, instance: ManagedInstance) -> None:
        async with self._turns.of(instance.spec.name):
            self._require_present(instance)
            await instance.load()

    async def declare(
        self, model_id: str, key: str = "", value: Callable[[str], float | None] = lambda name: None
    ) -> str | None:
        """Return the name of a model's instance, created for the calls of `key` if missing; None: not allowed.

        `value` returns the recent calls per second of an instance, None if it may not be unloaded now.

        Raises:
            Overloaded: calls have created too many instances and none can go now, or too many of the key are not
            loaded.
            TeimgrError: as `create`.
        """
        if not allows(self._settings.on_demand.models, model_id):
            return None
        if (found := self._name_of(model_id)) is not None:
            return found
        declaring = self._declare_in_turn(model_id, key, value)
        return await self._turns.carry_out(declaring, f"instance of {model_id}")

    async def _declare_in_turn(self, model_id: str, key: str, value: Callable[[str], float | None]) -> str:
        async with self._declaring:  # the limit and the name depend on calls before this one
            return self._name_of(model_id) or await self._declare(model_id, key, value)

    def _name_of(self, model_id: str) -> str | None:
        return next((name for name, each in self._instances.items() if each.spec.model_id == model_id), None)

    async def _declare(self, model_id: str, key: str, value: Callable[[str], float | None]) -> str:
        now = asyncio.get_running_loop().time()
        self._tries.check(model_id, key, now)
        made = [each for each in self._instances.values() if each.spec.by_call]
        values = [None if each.spec.pinned else value(each.spec.name) for each in made]
        held = [
            Made(each.spec.name, each.spec.by_key, worth, each.state is State.FAILED)
            for each, worth in zip(made, values, strict=True)
        ]
        limit = self._limit_of_calls()
        granted = grant(held, key, limit)
        if not granted.is_given or (granted.instead and not await self._give_place(granted, model_id)):
            raise Overloaded(
                f"No place for an instance of {model_id!r}: calls may have {limit} made", _NO_PLACE_RETRY_S
            )
        spec = InstanceSpec(
            name=name_of_model(model_id, self._instances),
            model_id=model_id,
            load="on_demand",
            idle_timeout_secs=self._settings.on_demand.idle_timeout_secs,
            tags={MADE_BY: A_CALL} | ({MADE_FOR: key} if key else {}),
            confined=True,
            by_call=True,
            by_key=key,
        )
        self._tries.begin(model_id, key, now)
        try:
            await self.create(spec)
        except InvalidConfig as error:  # unsupported model
            self._tries.refuse(model_id, error.code, error.message, now)
            raise
        except InstanceExists:
            if (made_meanwhile := self._name_of(model_id)) is None:  # another model took the name
                raise
            return made_meanwhile
        except (MaxInstancesReached, PortAllocationFailed) as error:  # callers of inference may retry
            raise Overloaded(error.message, _NO_PLACE_RETRY_S) from error
        return spec.name

    def _limit_of_calls(self) -> int:
        """Return how many further instances calls may create."""
        settings, others = self._settings, [each.spec for each in self._instances.values() if not each.spec.by_call]
        ports = range(settings.instance_port_start, settings.instance_port_end)
        left = left_for_calls(len(ports), sum(spec.port in ports for spec in others))
        if settings.max_instances is not None:
            left = min(left, left_for_calls(settings.max_instances, len(others)))
        return max(0, min(left, settings.on_demand.max_instances))

    async def _give_place(self, found: Grant, model_id: str) -> bool:
        """Delete the first instance that can go for one of another model; False if none can."""
        for each in found.instead:
            with suppress(TeimgrError):
                if each.has_failed and (failed := self.failure(each.name))[1] is None:
                    now = asyncio.get_running_loop().time()
                    self._tries.refuse(self._find(each.name).spec.model_id, failed[2], failed[0], now)
                # `unload` refuses if calls have arrived. A failed instance has no calls to check.
                is_loaded = not each.has_failed and self.get(each.name).state is not State.UNLOADED
                if not is_loaded or await self.unload(each.name, found.reason):
                    log.info(
                        "instance deleted to make room for another model",
                        extra={"instance": each.name, "reason": found.reason, "model_id": model_id},
                    )
                    await self.delete(each.name)
                    return True
        return False

    async def unload(self, name: str, reason: str = "", incident: Incident | None = None) -> bool:
        """End the workers of an on-demand instance without calls; False if it has calls, is pinned or not running.

        Raises:
            InstanceNotFound.
            Unavailable: the daemon is ending.
        """
        instance = await self._adopted_instance(name)
        return await self._turns.carry_out(self._unload(instance, reason, incident), f"unloading of {name}")

    async def _unload(self, instance: ManagedInstance, reason: str, incident: Incident | None) -> bool:
        async with self._turns.of(instance.spec.name):
            self._require_present(instance)
            unloading = instance.unload(reason, incident)
            return await self._planning.noted(instance.spec.name, incident, unloading)

    async def usage(self, name: str) -> dict[str, Usage | None]:
        """Return the calls that each running worker reports, by incarnation; None if it does not answer.

        Raises:
            InstanceNotFound.
        """
        return await self._find(name).usage()

    @property
    def memory(self) -> Admission:
        """The memory of hosts and cards, and what workers hold of it."""
        return self._planner.memory

    def spec(self, name: str) -> InstanceSpec | None:
        """The spec of an instance; None if it does not exist."""
        instance = self._instances.get(name)
        return instance.spec if instance is not None and not instance.is_deleted else None

    def devices(self, name: str) -> tuple[str, ...]:
        """Return the card and the host where a worker of an instance would be placed now; empty if there is no
        place."""
        with suppress(TeimgrError):
            spec = self._find(name).spec
            planned = self._planner.plan(spec, 0, self._planner.others(spec, ()))
            return tuple(dict.fromkeys((planned.gpu or planned.host, planned.host)))
        return ()

    def load_seconds(self, name: str) -> float | None:
        """Return how long an instance's model takes to load, from earlier loads; None without one."""
        spec = self.spec(name)
        return None if spec is None else self.memory.footprints.load_seconds(spec)

    def learn_load(self, name: str, seconds: float) -> None:
        """Record how long a load took; no effect if the instance does not exist."""
        if (spec := self.spec(name)) is not None:
            self.memory.footprints.learn_load(spec, seconds)
            self._tries.loaded(spec.model_id)

    def failure(self, name: str) -> tuple[str, float | None, Code | None]:
        """Return why an instance failed, and in how many seconds it is restarted; None: not automatically.

        The third value is the error code for calls that named a model that cannot be loaded.

        Raises:
            InstanceNotFound.
        """
        instance = self._find(name)
        is_callers = instance.spec.by_call and instance.retry_s is None
        code = (
            next((each for each in _UNAVAILABLE_MODEL_CODES if each == instance.failure_code), None)
            if is_callers
            else None
        )
        return instance.view().reason or "see its log", instance.retry_s, code

    async def give_up(self, name: str) -> None:
        """Delete a failed instance that calls created, so that the next call tries its model again."""
        with suppress(InstanceNotFound):
            instance = self._find(name)
            if instance.spec.by_call and instance.state is State.FAILED:
                await self._turns.carry_out(self._delete(instance), f"deletion of {name}")

    def note(self, name: str, incident: Incident) -> None:
        """Record an incident of an instance without a change of its state; no effect if it does not exist."""
        if (instance := self._instances.get(name)) is not None:
            instance.on_incident(incident)

    async def restart(self, name: str, *, rolling: bool = False, wait: bool = False) -> InstanceView:
        """Replace the workers; return when the old ones have ended and the new ones are starting.

        With `rolling`, like an `update` without changes, if the instance should run.

        Raises:
            InstanceNotFound.
            UpdateInProgress, UpdateFailed: as `update`.
        """
        instance = await self._adopted_instance(name)
        if not rolling or not instance.is_to_run:
            return await self._command(name, Command.RESTART)
        await self._turns.carry_out(self._roll(instance), f"rolling restart of {name}")
        if wait:
            await instance.update_finished()
        return instance.view()

    async def _roll(self, instance: ManagedInstance) -> None:
        await self._planner.refresh()
        async with self._turns.of(instance.spec.name):
            self._records.ordered(instance.spec.name)
            await instance.update({}, restart=True)

    async def delete(self, name: str, *, purge: bool = False) -> InstanceView:
        """Stop and remove an instance; return its last view when its processes have ended.

        With `purge` its logs are removed; else they stay, and logs of an instance that calls created are set aside
        (`set_log_aside`).

        Raises:
            InstanceNotFound: also if another call deleted it meanwhile, with `purge`.
            Internal: it is deleted, but its logs could not be removed.
        """
        instance = await self._adopted_instance(name, also_deleted=True)
        return await self._turns.carry_out(self._delete(instance, purge), f"deletion of {name}")

    async def _delete(self, instance: ManagedInstance, purge: bool = False) -> InstanceView:
        name = instance.spec.name
        problem = None
        async with self._turns.of(name):
            if self._instances.get(name) is not instance:
                if purge:  # the logs may belong to a new instance of that name
                    raise InstanceNotFound(name)
                return instance.view()
            async with self._state.planning(name, lambda spec: None):
                self._records.ordered(name)
                await instance.accept(Command.DELETE)
                view = await instance.settle()
                await instance.ended()
                if (is_by_call := instance.spec.by_call) or purge:  # callers invent names, so logs would pile up
                    problem = await self._end_logs(name, remove_logs if purge else set_log_aside)
                self._forget(name, instance)
                if is_by_call:
                    self._records.metrics.drop(name)
        self._records.metrics.count(catalogue.DELETED, "(by calls)" if is_by_call else name)
        self._keep_few_series(name)
        if purge and problem:
            raise Internal(f"Instance '{name}' is deleted, but not all of its logs: {problem}")
        return view

    async def _end_logs(self, name: str, work: Callable[[Path, str], None]) -> str | None:
        """Set logs aside or remove them while the name is taken, since the next worker of that name opens its own log.

        Return a problem, such as a full or unresponsive disk, for which no call is refused.
        """
        try:
            async with asyncio.timeout(_LOG_LIMIT_S):
                await asyncio.to_thread(work, self._settings.log_dir, name)
        except OSError as error:
            return str(error) or f"the disk did not answer within {_LOG_LIMIT_S:g} s"
        return None

    def _keep_few_series(self, deleted: str) -> None:
        """Drop the metric series of instances deleted long ago, since callers choose the names."""
        self._deleted.pop(deleted, None)
        self._deleted[deleted] = None
        if len(self._deleted) > _MAX_DELETED_SERIES:
            oldest = next(iter(self._deleted))
            del self._deleted[oldest]
            if oldest not in self._instances:
                self._records.metrics.drop(oldest)

    def _forget(self, name: str, instance: ManagedInstance) -> None:
        del self._instances[name]
        instance.forget()
        self._state.drop_update(name)
        self._records.deleted(name)

    def reconfigure(self, settings: Settings) -> None:
        """Apply the keys of a reload that need no restart."""
        self.tokens_per_gib = settings.auto_max_batch_tokens_per_gib

    def _leave_host(self, host: str, was_removed: bool) -> None:
        if not self._is_shutting_down:
            self._departures.begin(host, was_removed=was_removed)

    def alarms(self) -> list[str]:
        """The alarms of instances; `store_alarm` has that of the state file."""
        return [*(each for found in self._instances.values() for each in found.problems), *self._sweep.alarms()]

    async def started(self, name: str) -> InstanceView:
        """Return the view of an instance once it is no longer starting, or when its time to start has passed.

        Raises:
            InstanceNotFound: it does not exist, or was deleted meanwhile.
        """
        limit_s = self._find(name).spec.startup_timeout_secs or self._settings.startup_timeout_secs
        with self._records.watching(name) as changed, suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._find(name).state is State.STARTING:
                    changed.clear()
                    await changed.wait()
        return self._find(name).view()

    def scaled(self) -> list[InstanceView]:
        """Return the instances whose number of replicas is decided by the load."""
        return [each.view() for each in self._instances.values() if each.spec.max_replicas and not each.is_deleted]

    def list(self) -> list[InstanceView]:
        return [instance.view() for instance in self._instances.values()]

    def get(self, name: str) -> InstanceView:
        """One instance.

        Raises:
            InstanceNotFound.
        """
        return self._find(name).view()

    def replicas(self, spec: InstanceSpec) -> int:
        """Return the number of workers for this spec; "per-gpu" counts the present cards."""
        return self._planner.replicas(spec)

    def planned_workers(self, name: str) -> int:
        """Return how many workers an instance has or will have, by its spec or its update. Raises InstanceNotFound."""
        return self._find(name).planned_workers

    @property
    def store_alarm(self) -> str | None:
        return self._state.alarm_text

    def follow(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the name of each instance whose view changes."""
        self._records.follow(listener)

    async def _command(self, name: str, command: Command) -> InstanceView:
        instance = await self._adopted_instance(name)
        await self._turns.carry_out(self._accept(instance, command), f"{command.value} of {name}")
        return await instance.settle()

    async def _accept(self, instance: ManagedInstance, command: Command) -> None:
        name, wanted = instance.spec.name, command is not Command.STOP
        async with self._turns.of(name):
            self._require_present(instance)
            async with self._state.planning(name, lambda spec: replace(spec, wanted_running=wanted)):
                self._records.ordered(name)
                await instance.accept(command)

    def _require_present(self, instance: ManagedInstance) -> None:
        """Raise InstanceNotFound if the instance was deleted while the command waited for its turn."""
        if self._instances.get(instance.spec.name) is not instance:
            raise InstanceNotFound(instance.spec.name)

    async def _check(self, spec: InstanceSpec) -> None:
        """Validate the keys, and the model as far as its files are on this host."""
        self._check_keys(spec)
        await asyncio.to_thread(check_model, worker_spec(spec, self._settings))

    def _check_keys(self, spec: InstanceSpec) -> None:
        check_instance(spec)
        check_allowed(spec, self._settings)

    # Instances

    def _add(self, spec: InstanceSpec) -> ManagedInstance:
        if spec.name in self._instances:
            raise InstanceExists(spec.name)
        instance = self._instances[spec.name] = ManagedInstance(spec, self._context, self._directory, self._state)
        return instance

    async def _adopted_instance(self, name: str, *, also_deleted: bool = False) -> ManagedInstance:
        """Return the instance, once its workers of an earlier daemon are adopted.

        Raises:
            InstanceNotFound: it does not exist, or is being deleted (not with `also_deleted`).
        """
        await self.booted.wait()
        instance = self._find(name)
        await instance.adoption_over()
        if instance.is_deleted and not also_deleted:
            raise InstanceNotFound(name)
        return instance

    def _owned(self) -> set[str]:
        """Return the incarnations of all supervised workers."""
        return {incarnation for instance in self._instances.values() for incarnation in instance.incarnations()}

    def _find(self, name: str) -> ManagedInstance:
        try:
            return self._instances[name]
        except KeyError:
            raise InstanceNotFound(name) from None


def name_of_model(model_id: str, taken: Container[str]) -> str:
    """Make a valid instance name from a model id."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", model_id).lstrip("._-")[:_NAME_CHARS] or "model"
    if name not in taken:
        return name
    return f"{name[: _NAME_CHARS - 9]}-{hashlib.sha256(model_id.encode()).hexdigest()[:8]}"
