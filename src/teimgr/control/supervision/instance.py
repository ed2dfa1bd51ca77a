"""One instance: its spec, the supervisors of its replicas, and updates without a gap in service.

Replicas serve in parallel and fail independently. An update that needs new workers starts a second set of replicas (a
rolling update):

    join      the new workers start, while the old ones serve; if a new one fails, the update is rolled back
    commit    the state file gets the new spec
    switch    the directory lists only the new workers, and every mux has confirmed it
    leave     the old workers stop accepting and confirm it, which completes the update; they finish their calls and
              exit

If the daemon crashes before the commit, the next daemon keeps the old workers; after the commit, the new ones. It ends
the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from teimgr.control.launch.launcher import Adopted
from teimgr.control.ledger.ledger import Overrun, Place
from teimgr.control.ledger.system_memory import MemoryLimit, Verdict, mib
from teimgr.control.supervision.lifecycle import Command, is_routable
from teimgr.control.supervision.store import WantedState
from teimgr.control.supervision.supervisor import Supervisor, SupervisorContext
from teimgr.control.supervision.validation import with_changes
from teimgr.control.supervision.worker_run import Usage
from teimgr.errors import (
    InstanceNotFound,
    NotRunning,
    StateNotSaved,
    TeimgrError,
    Unavailable,
    UpdateFailed,
    UpdateInProgress,
)
from teimgr.observability import catalogue
from teimgr.spec import (
    KEYS,
    Change,
    CpuThreads,
    Incident,
    InstanceSpec,
    InstanceView,
    RouteEntry,
    State,
    UpdateView,
    WorkerEndpoint,
    now_rfc3339,
)
from teimgr.wire.routing.directory import Directory

log = logging.getLogger(__name__)

# The state of an instance is the first of these that any replica has.
_PRECEDENCE = (State.RUNNING, State.STARTING, State.STOPPING, State.FAILED, State.STOPPED)
_GIVEN_UP = "given up: another command came in between"
_CONTINUED = "the daemon is ending; the next one continues the update"
_NOTABLE_BYTES = 64 << 20  # smaller overruns of a reservation are only in the debug log


class ManagedInstance:
    """The replicas of one instance and the updates of its spec, which `state` keeps and `directory` routes by."""

    def __init__(
        self, spec: InstanceSpec, context: SupervisorContext, directory: Directory, state: WantedState
    ) -> None:
        self.spec = self._updated_spec = spec
        self._directory = directory
        self._wanted = state
        self._context = context
        self._workers: list[Supervisor] = []
        self._tasks: dict[Supervisor, asyncio.Task[None]] = {}
        self._past_restarts = 0  # restarts of replicas that updates replaced
        self._update: UpdateView | None = None
        self._update_task: asyncio.Task[None] | None = None
        self._unsaved: StateNotSaved | None = None  # why the last update was rolled back, if by the disk
        self.placing = asyncio.Lock()
        self._one_command = asyncio.Lock()  # held during commands and updates
        self._is_past_cancelling = False  # the update is committed or being rolled back
        self._is_deleted = False
        self._is_closing = False
        self._is_forgotten = False
        self._serves: tuple[str, ...] = ()  # tasks of the last loaded model
        self._is_adopted = False  # adoption of an earlier daemon's workers is over
        self._incident: Incident | None = None
        self._failed_start: Incident | None = None  # crash of a worker started by the current update
        self._outgoing: frozenset[Supervisor] = frozenset()  # replicas that the current update will end
        self._memory: MemoryLimit | None = None
        self._recycling: asyncio.Task[None] | None = None
        self._is_unloading = False
        self._is_recreating = False  # the update stops the old workers first
        self._unloaded_because: str | None = None
        self._resting: InstanceView | None = None  # cached view, valid until the next event
        self._add(spec, range(context.planner.replicas(spec)), "serving")
        self._publish()

    # State

    @property
    def state(self) -> State:
        """RUNNING while one replica is running."""
        return kept.state if (kept := self.resting) is not None else self._present_state()

    def _present_state(self) -> State:
        states = {each.state for each in self._serving}
        state = next(state for state in _PRECEDENCE if state in states)
        if state is State.RUNNING and self._is_unloading:
            return State.STOPPING
        if state is not State.STOPPED:
            return state
        if self._is_recreating or self._with_role("joining") or (self.spec.wanted_running and not self._is_adopted):
            return State.STARTING
        return State.UNLOADED if self._loads_on_demand else state

    @property
    def _loads_on_demand(self) -> bool:
        return self.spec.load == "on_demand" and self.spec.wanted_running

    @property
    def is_to_run(self) -> bool:
        """True if it should have workers now: it was not stopped, and it is not an on-demand instance waiting for a
        call."""
        return self.spec.wanted_running and self.state is not State.UNLOADED

    @property
    def workers(self) -> list[Supervisor]:
        """The supervisors of all replicas, including joining ones."""
        return [each for each in self._workers if each.role != "leaving"]

    @property
    def is_supervised(self) -> bool:
        return bool(self._tasks)

    @property
    def is_deleted(self) -> bool:
        """True if a deletion has begun."""
        return self._is_deleted

    @property
    def _may_update(self) -> bool:
        return not (self._is_deleted or self._is_closing or self.is_updating)

    def incarnations(self) -> Iterator[str]:
        """Yield the incarnations of the workers that its supervisors have now."""
        return (each.incarnation for each in self._workers if each.incarnation is not None)

    @property
    def resting(self) -> InstanceView | None:
        """Return the view of an instance without processes while nothing has changed; None otherwise.

        Most of thousands of declared instances are in this state: a pass over all of them should cost nothing for
        these.
        """
        kept = self._resting
        if kept is None:
            return None
        is_valid = kept.spec is self.spec and kept.update is self._update and kept.incident is self._incident
        return kept if is_valid else None

    def view(self) -> InstanceView:
        """Return a snapshot for display; a single value for several workers is that of the first running replica."""
        if (kept := self.resting) is not None:
            return kept
        view = self._present_view()
        rests = self._is_adopted and all(each.rests for each in self._workers)
        self._resting = view if rests and not self.is_updating else None
        return view

    def _present_view(self) -> InstanceView:
        serving = self._serving
        views = [each.view() for each in serving]
        rank = {State.RUNNING: 0, State.STARTING: 1, State.STOPPING: 1}
        first, shown = min(zip(serving, views, strict=True), key=lambda pair: rank.get(pair[1].state, 2))
        others = [each.view() for each in (*self._with_role("joining"), *self._with_role("leaving"))]
        state = self._present_state()
        return InstanceView(
            spec=self.spec,
            state=state,
            pid=shown.pid,
            uptime_secs=shown.uptime_secs,
            restarts=self._past_restarts + sum(each.restarts for each in views),
            health_check_failures=sum(each.health_check_failures for each in views),
            last_health_check=max((each.last_health_check for each in views if each.last_health_check), default=None),
            reason=(self._unloaded_because if state is State.UNLOADED else None)
            or next((each.reason for each in views if each.reason), None),
            model=first.model,
            threads=first.threads,
            workers=(*views, *others),
            update=self._update,
            incident=self._incident,
        )

    # Commands

    async def begin(self, adopted: Mapping[int, Adopted], *, start: bool) -> None:
        """Start supervision, with the adopted workers by replica; with `start`, also the replicas that have none.

        Replicas that failed permanently are not started; replicas without work get a task at their first command.
        """
        async with self._one_command:
            self._add(self.spec, range(len(self._serving), self._context.planner.replicas(self.spec)), "serving")
            begun = [each for each in self._serving if start or each.number in adopted]
            for each in begun:
                self._supervise(each, adopted.get(each.number))
            await asyncio.gather(*(each.started.wait() for each in begun))
            for each in begun:
                if start and not self._is_closing and each.state is State.STOPPED:
                    await each.accept(Command.START)
        self._is_adopted = True
        self._context.records.wake(self.spec.name)
        if self.state is State.UNLOADED:
            self.on_state_changed()

    async def adoption_over(self) -> None:
        """Return once the workers of an earlier daemon are adopted."""
        with self._context.records.watching(self.spec.name) as changed:
            while not self._is_adopted:
                await changed.wait()
                changed.clear()

    def accepts_no_more_starts(self) -> None:
        """Refuse starts, restarts and updates from now on: the daemon ends."""
        self._is_closing = True

    async def load(self) -> None:
        """Start the workers of an instance that is unloaded; no effect in another state.

        Raises:
            Unavailable: the daemon is ending.
        """
        async with self._one_command:
            if self._is_closing:
                raise Unavailable("the daemon is ending")
            if self.state is State.UNLOADED and not self._is_deleted:
                self._unloaded_because = None
                await self._send(self._serving, Command.START)

    async def unload(self, reason: str = "", incident: Incident | None = None) -> bool:
        """End the workers of an on-demand instance; False, without a change, if it has calls or is pinned.

        It leaves the routes first, so that no call is on its way to a worker when calls are counted. `incident` is
        recorded once it ends.
        """
        async with self._one_command:
            if not (self._may_update and self._loads_on_demand):
                return False
            if self.state is State.STARTING:
                await self._send(self._serving, Command.STOP)
                await asyncio.gather(*(each.settle() for each in self._serving))
                return True
            if self.state is not State.RUNNING or self.spec.pinned:
                return False
            self._is_unloading = True
            self._publish()
            try:
                await self._directory.confirmed()
                running = [each for each in self._serving if each.state is State.RUNNING]
                used = await asyncio.gather(*(each.usage() for each in running))
                if any(each is None or each.under_way for each in used):
                    return False
                if incident is not None:
                    self._incident = incident
                self._unloaded_because = reason or None
                await self._send(self._serving, Command.STOP)
                await asyncio.gather(*(each.settle() for each in self._serving))
                return True
            finally:
                self._is_unloading = False
                self.on_state_changed()

    async def usage(self) -> dict[str, Usage | None]:
        """Return the calls of each running worker by incarnation; None if it does not answer."""
        running = {each.incarnation or "": each for each in self._serving if each.state is State.RUNNING}
        found = await asyncio.gather(*(each.usage() for each in running.values()))
        return dict(zip(running, found, strict=True))

    async def accept(self, command: Command, *, keep_wanted: bool = False) -> None:
        """Pass the command to every replica; `settle` waits until it is carried out.

        It also sets `spec.wanted_running`, unless `keep_wanted`. An uncommitted update is rolled back, except by a
        start.

        Raises:
            AlreadyRunning, NotRunning, InstanceNotFound: no replica allows it in its present state.
        """
        async with self._one_command:
            if self._is_closing and command in (Command.START, Command.RESTART):
                raise Unavailable("the daemon is ending")
            self._is_deleted |= command is Command.DELETE  # prevents new updates
            if command in (Command.STOP, Command.RESTART, Command.DELETE):
                await self._cancel_update()
            asked = self._workers if command is Command.DELETE else self._serving
            is_unloaded = self.state is State.UNLOADED
            answers = await asyncio.gather(*(self._order(each, command) for each in asked), return_exceptions=True)
            refusals = [answer for answer in answers if isinstance(answer, BaseException)]
            may_be_refused = command is Command.DELETE or (is_unloaded and command is Command.STOP)
            if len(refusals) == len(answers) and not may_be_refused:
                raise refusals[0]
            if not keep_wanted:
                self.spec = replace(self.spec, wanted_running=any(each.is_wanted for each in self._serving))
            if is_unloaded or command is Command.START:  # the routes still have the old spec
                self.on_state_changed()

    async def settle(self) -> InstanceView:
        """Return the view as soon as no process is ending."""
        await asyncio.gather(*(each.settle() for each in (*self._serving, *self._with_role("leaving"))))
        return self.view()

    @property
    def alive(self) -> Counter[str]:
        """Count the workers that exist or are being started, by host; a fleet of one host has the name ""."""
        return Counter(each.host for each in self.workers if each.state in (State.STARTING, State.RUNNING))

    def set_threads(self, share: Callable[[str], CpuThreads]) -> None:
        """Set the CPU threads of each worker: the key `threads` exactly, else the fair share of its host."""
        for each in self.workers:
            fixed = each.spec.threads
            each.set_threads(CpuThreads(fixed, fixed) if fixed else share(each.host))

    def force_stop(self) -> None:
        for each in self._workers:
            each.force_stop()

    @property
    def problems(self) -> Iterator[str]:
        """Yield sentences about problems, for an operator."""
        if (kept := self.resting) is not None and kept.state is not State.FAILED:
            return
        is_a_callers = self.spec.by_call and self.retry_s is None  # a caller's mistake, such as an unknown model id
        if self.state is State.FAILED and self.spec.wanted_running and not is_a_callers:
            yield f"{self.spec.name}: failed: {self.view().reason}"
        running = [each.number for each in self._serving if each.state is State.RUNNING]
        starting = [each.start_problem for each in self._serving if each.start_problem]
        for problem in (*starting[:1], *(self._memory.problems(running) if self._memory is not None else ())):
            yield f"{self.spec.name}: {problem}"
        yield from (each.worker_alarm for each in self._serving if each.worker_alarm is not None)

    def mark_failed(self, reason: str) -> None:
        """Mark the instance as one that cannot be started as it is; call this before `begin`."""
        for each in self._serving:
            each.mark_failed(reason)
        self._publish()

    def close(self) -> list[asyncio.Task[None]]:
        """Cancel supervision, leaving the workers running; return the cancelled tasks."""
        tasks = [*self._tasks.values()]
        if self._recycling is not None and not self._recycling.done():
            tasks.append(self._recycling)
        for task in tasks:
            task.cancel()
        return tasks

    async def ended(self) -> None:
        """Return when the last supervisor of a deleted instance has ended."""
        while self._tasks:
            await asyncio.wait([*self._tasks.values()])

    def forget(self) -> None:
        self._is_forgotten = True
        self._directory.remove(self.spec.name)

    # Updates

    async def update(self, changes: Mapping[str, Any], *, recreate: bool = False, restart: bool = False) -> None:
        """Begin a rolling update; an update that needs no new worker is finished when this returns.

        Args:
            changes: Fields of the spec; None resets one to its default.
            recreate: End the old workers before the new ones start.
            restart: Replace the workers even if nothing that matters to them changes.

        Raises:
            InstanceNotFound: it is being deleted.
            UpdateInProgress: another update is under way.
            StateNotSaved: the disk refused an update that needs no new worker.
            InvalidConfig: an extra argument cannot be parsed.
        """
        async with self._one_command:
            if self._is_deleted:
                raise InstanceNotFound(self.spec.name)
            if self._is_closing:
                raise Unavailable("the daemon is ending")
            if self.is_updating:
                raise UpdateInProgress(self.spec.name)
            spec = self._updated_spec = with_changes(self.spec, changes)
            needed = Change.REPLACE if restart else self._context.planner.change_needed(self.spec, spec)
            replacing = partial(self._replace, spec, recreate=recreate)
            steps = replacing if needed is Change.REPLACE else partial(self._scale, spec)
            task = self._begin_update_of(steps, changes)
            if needed is Change.IN_PLACE or not self.is_to_run:
                await asyncio.wait({task})
                self._raise_unsaved()

    @property
    def retry_s(self) -> float | None:
        """Seconds until a failed instance is restarted; None: it is not restarted automatically."""
        return min((each.retry_s for each in self._serving if each.retry_s is not None), default=None)

    @property
    def failure_code(self) -> int | None:
        """The `errors.Code` number that a failed worker reported."""
        return next((each.failure_code for each in self._serving if each.has_failed), None)

    @property
    def planned_workers(self) -> int:
        """The number of present workers, or of those that the spec or the present update will start."""
        spec = self._updated_spec if self.is_updating else self.spec
        return max(len(self._workers), self._context.planner.replicas(spec))

    @property
    def is_updating(self) -> bool:
        """True if an update is under way."""
        return self._update_task is not None and not self._update_task.done()

    def _begin_update_of(self, steps: Callable[[], Awaitable[None]], changes: Iterable[str]) -> asyncio.Task[None]:
        self._update = UpdateView(
            state="rolling",
            changes=tuple(sorted(key for key in changes if not KEYS[key].secret)),
            started_at=now_rfc3339(),
        )
        self._is_past_cancelling = False
        self._unsaved = None
        self._update_task = asyncio.create_task(self._run_update(steps), name=f"update of {self.spec.name}")
        return self._update_task

    async def update_finished(self) -> None:
        """Return when no update is under way.

        Raises:
            StateNotSaved: the last one was rolled back, because the disk refused.
            UpdateFailed: the last one failed and was rolled back.
            Unavailable: the daemon ended before the update was over; the next daemon continues it.
        """
        if self._update_task is not None:
            await asyncio.wait({self._update_task})
        self._raise_unsaved()
        if self._update is not None and self._update.reason == _CONTINUED:
            raise Unavailable(f"Update of '{self.spec.name}': {_CONTINUED}")
        if self._update is not None and self._update.state == "failed":
            raise UpdateFailed(f"Update of '{self.spec.name}' failed and was rolled back: {self._update.reason}")

    def _raise_unsaved(self) -> None:
        if self._unsaved is not None:
            raise self._unsaved

    async def _run_update(self, steps: Callable[[], Awaitable[None]]) -> None:
        state, reason = "failed", _GIVEN_UP
        self._failed_start = None
        try:
            await steps()  # created here: a task cancelled before its start would leave a coroutine unawaited
            state, reason = "done", ""
        except TeimgrError as error:
            reason = error.message
            self._unsaved = error if isinstance(error, StateNotSaved) else None
            report = self._failed_start.crash_report if self._failed_start else None
            self._incident = Incident(event="update_failed", reason=reason, at=now_rfc3339(), crash_report=report)
        finally:
            assert self._update is not None
            if self._is_closing and self._update.changes and reason == _GIVEN_UP:
                reason = _CONTINUED
            self._update = replace(self._update, state=state, reason=reason or None, finished_at=now_rfc3339())
            facts = {"instance": self.spec.name, "state": state, "changes": self._update.changes, "reason": reason}
            log.log(logging.INFO if state == "done" else logging.WARNING, "update", extra=facts)
            self.on_state_changed()

    async def _replace(self, spec: InstanceSpec, *, recreate: bool) -> None:
        old, is_restart, stops_first = self._serving, spec == self.spec, recreate and self.is_to_run
        self._is_recreating = stops_first
        try:
            if stops_first:
                await self._send(old, Command.STOP)
                await asyncio.gather(*(each.settle() for each in old))
            new = await self._join(spec, range(self._context.planner.replicas(spec)), outgoing=old)
        except BaseException:
            self._is_past_cancelling = True
            if stops_first:
                await self._send(old, Command.START)
            raise
        finally:
            self._is_recreating = False
        self._past_restarts += sum(each.restarts for each in old) + is_restart
        await self._switch(new, leaving=old)

    async def _scale(self, spec: InstanceSpec) -> None:
        """Keep as many workers as the number of replicas allows; start or end the difference."""
        present, count = self._serving, self._context.planner.replicas(spec)
        new: list[Supervisor] = []
        if count > len(present):
            new = await self._join(spec, range(len(present), count))
        else:
            await self._commit(spec)
        for each in present[:count]:
            each.respecify(spec)
        await self._switch(new, leaving=present[count:])

    async def _join(
        self,
        spec: InstanceSpec,
        numbers: Iterable[int],
        outgoing: Iterable[Supervisor] = (),
        destination: Place | None = None,
    ) -> list[Supervisor]:
        """Start replicas, wait until all run, and commit the spec; roll back on failure.

        They are placed in addition to the serving ones, except those that are `outgoing`; at `destination`, if given.

        Raises:
            UpdateFailed: one of them failed.
        """
        runs = self.is_to_run
        self._outgoing = frozenset(outgoing)
        new = self._add(spec, numbers, "joining")
        for each in new:
            if destination is not None:
                each.go_to(destination)
            self._supervise(each, None)
        before = self.spec
        try:
            if runs:
                await self._send(new, Command.START)
                await self._all_running(new)
            await self._commit(spec)
        except BaseException:
            self._is_past_cancelling = True  # a cancelled rollback would leave a new worker running
            self.spec = before
            await self._send(new, Command.DELETE)
            if tasks := [self._tasks[each] for each in new if each in self._tasks]:
                await asyncio.wait(tasks)
            self._workers = [each for each in self._workers if each not in new]
            raise
        return new

    async def _all_running(self, workers: Iterable[Supervisor]) -> None:
        with self._context.records.watching(self.spec.name) as changed:
            while True:
                changed.clear()
                for each in workers:
                    if each.has_failed or each not in self._tasks:
                        raise UpdateFailed(each.reason or "the new worker failed")
                if all(each.state is State.RUNNING for each in workers):
                    return
                await changed.wait()

    async def _commit(self, spec: InstanceSpec) -> None:
        self._is_past_cancelling = True
        try:
            await self._wanted.save_spec(spec)
        except BaseException:
            self._is_past_cancelling = False
            raise
        self.spec = spec

    async def _switch(self, joining: Iterable[Supervisor], leaving: Iterable[Supervisor]) -> None:
        """Publish the new workers in place of the leaving ones, then end these; return when no call reaches them."""
        leaving = list(leaving)
        for each in joining:
            each.join()
        for each in leaving:
            each.leave()
        self._publish()
        if leaving:
            await self._directory.confirmed()
            await self._send(leaving, Command.RETIRE)
            await asyncio.gather(*(each.left_ports() for each in leaving))

    async def _send(self, workers: Iterable[Supervisor], command: Command) -> None:
        for each in workers:
            with suppress(TeimgrError):  # refused if it is already in that state
                await self._order(each, command)

    async def _order(self, replica: Supervisor, command: Command) -> None:
        """Pass a command to a replica; the first one also starts the task of a replica that has none yet."""
        if replica not in self._tasks and not replica.is_closed:
            self._supervise(replica, None)
        await replica.accept(command)

    async def _cancel_update(self) -> None:
        """Roll back the present update, or wait for its end if it is committed or already failing."""
        if self._update_task is not None and not self._update_task.done():
            if not self._is_past_cancelling:
                self._update_task.cancel()
            await asyncio.wait({self._update_task})

    async def give_up_update(self, limit_s: float) -> None:
        """Roll back an uncommitted update within the limit; called when the daemon ends and its workers stay."""
        if self.is_updating:
            await asyncio.wait({asyncio.create_task(self._cancel_update())}, timeout=limit_s)

    # Supervisors

    def siblings_of(self, supervisor: Supervisor) -> list[Supervisor]:
        """The other replicas that serve together with it."""
        others = [each for each in self._with_role(supervisor.role) if each is not supervisor]
        if supervisor.role == "joining":
            others += [each for each in self._serving if each not in self._outgoing]
        return others

    @property
    def _serving(self) -> list[Supervisor]:
        return self._with_role("serving")

    def _with_role(self, role: str) -> list[Supervisor]:
        return [each for each in self._workers if each.role == role]

    def _add(self, spec: InstanceSpec, numbers: Iterable[int], role: str) -> list[Supervisor]:
        new = [Supervisor(spec, number, role, self._context, self) for number in numbers]
        self._workers += new
        return new

    def _supervise(self, supervisor: Supervisor, adopted: Adopted | None) -> None:
        name = f"supervisor of {self.spec.name}, replica {supervisor.number}"
        task = self._tasks[supervisor] = asyncio.create_task(supervisor.run(adopted), name=name)
        task.add_done_callback(lambda task: self._on_supervisor_ended(supervisor, task))

    def _on_supervisor_ended(self, supervisor: Supervisor, task: asyncio.Task[None]) -> None:
        del self._tasks[supervisor]
        self._resting = None
        if supervisor.role == "leaving":
            self._workers.remove(supervisor)
        if not task.cancelled() and (error := task.exception()):
            log.critical(
                "supervisor failed with an unexpected exception", exc_info=error, extra={"task": task.get_name()}
            )
        self._context.records.wake(self.spec.name)

    def on_state_changed(self) -> None:
        self._resting = None
        self._publish()
        if not self._is_forgotten:
            self._context.records.changed(self)

    def on_placed(self) -> None:
        self._context.records.wake(self.spec.name)

    def on_crash(self, supervisor: Supervisor, incident: Incident) -> None:
        if supervisor.role == "joining":
            self._failed_start = incident
        else:
            self._incident = incident

    def on_incident(self, incident: Incident) -> None:
        """Record an incident of the instance that does not change its state."""
        self._incident = incident
        self._context.records.changed(self)

    # Memory

    def on_memory(self, supervisor: Supervisor, resident_bytes: int, fresh: bool) -> None:
        """Replace a replica that stays above `max_rss_mib`, unless an update is in progress."""
        limit_mib = supervisor.spec.max_rss_mib
        if limit_mib is None:
            self._memory = None
        if limit_mib is None or supervisor.role == "leaving" or (self.is_updating and not fresh):
            return
        self._memory = self._memory or MemoryLimit()
        number, now = supervisor.number, asyncio.get_running_loop().time()
        verdict = self._memory.read(number, resident_bytes, limit_mib, now, fresh=fresh)
        if verdict is Verdict.TOO_LARGE:
            self._on_over_memory(self._memory.problems([number])[0])
        elif verdict is Verdict.REPLACE and not self._one_command.locked():  # otherwise retried at the next reading
            recycling = self._recycle(supervisor, self._memory, resident_bytes)
            self._recycling = asyncio.create_task(recycling, name=f"recycling of {self.spec.name}")

    def on_overrun(self, supervisor: Supervisor, overrun: Overrun) -> None:
        """Record that a worker takes more memory than was reserved; its reservation has been raised."""
        reserved, takes = overrun.reserved_bytes, overrun.measured_bytes
        facts = {"instance": self.spec.name, "replica": supervisor.number}
        is_notable = takes - reserved > _NOTABLE_BYTES
        level = logging.WARNING if is_notable else logging.DEBUG
        log.log(
            level,
            "worker exceeds its memory reservation: %d MiB reserved, %d MiB used",
            reserved >> 20,
            takes >> 20,
            extra=facts,
        )
        if is_notable:
            reason = f"replica {supervisor.number} uses {mib(takes)}, more than the {mib(reserved)} reserved"
            self.on_incident(Incident(event="over_memory", reason=reason, at=now_rfc3339()))

    async def _recycle(self, old: Supervisor, memory: MemoryLimit, resident_bytes: int) -> None:
        async with self._one_command:
            if not self._may_update or old.role != "serving" or old.state is not State.RUNNING:
                return
            memory.begin_pause(old.number, asyncio.get_running_loop().time())
            self._begin_update_of(partial(self._replace_one, old), ())
        excess = f"{mib(resident_bytes)}, more than max_rss_mib = {old.spec.max_rss_mib}"
        self._on_over_memory(f"replica {old.number} has {excess}: it is being replaced")
        self._context.records.metrics.count(catalogue.MEMORY_REPLACEMENTS, self.spec.name)

    async def move_off(self, host: str, was_removed: bool) -> bool:
        """Call `leave_host`, and for a host that `was_removed` also `abandon_host` for the rest; return False then."""
        try:
            await self.leave_host(host)
        except TeimgrError as error:
            facts = {"instance": self.spec.name, "node": host, "reason": error.message}
            log.warning("worker not moved to another host", extra=facts)
            if was_removed:
                await self.abandon_host(host)
            return False
        return True

    async def leave_host(self, host: str) -> None:
        """Replace the running replicas on `host` by replicas elsewhere, one by one, by the steps of an update.

        Raises:
            UpdateFailed: no other host takes a replica, or it failed to start; the old one keeps serving.
        """
        await self._replace_each(lambda worker: worker.host == host)

    async def renew(self, incarnations: Collection[str]) -> None:
        """Replace each of these workers, one after the other, by the steps of an update.

        Raises:
            UpdateFailed: a new worker failed to start; the old one keeps serving, as do those after it.
        """
        await self._replace_each(lambda worker: worker.incarnation in incarnations)

    async def _replace_each(self, which: Callable[[Supervisor], bool]) -> None:
        for old in self._serving:
            async with self._one_command:
                if not self._may_update or not which(old) or old.state is not State.RUNNING:
                    continue
                self._begin_update_of(partial(self._replace_one, old), ())
            await self.update_finished()

    async def abandon_host(self, host: str) -> None:
        """End the running replicas on `host`, which was removed; each starts again once another host takes it."""
        async with self._one_command:
            there = [each for each in self._serving if each.host == host and each.state is State.RUNNING]
            if not self._may_update or not there:
                return
            failure = (self._update.reason if self._update else None) or "no other host has room for them"
            reason = f"host {host!r} was removed from the fleet, and its workers are ended: {failure}"
            self.on_incident(Incident(event="no_host", reason=reason, at=now_rfc3339()))
            await self._send(there, Command.RESTART)

    async def move(self, replica: int, destination: Place) -> None:
        """Replace a running replica by one at `destination`, by the steps of an update; return when that is done.

        Raises:
            NotRunning: it does not run, or no longer.
            UpdateInProgress: another update is in progress.
            UpdateFailed: the new replica did not start; the old one keeps serving.
        """
        async with self._one_command:
            old = next((each for each in self._serving if each.number == replica), None)
            if self._is_deleted or self._is_closing or old is None or old.state is not State.RUNNING:
                raise NotRunning(self.spec.name, self.state.value)
            if self.is_updating:
                raise UpdateInProgress(self.spec.name)
            self._begin_update_of(partial(self._replace_one, old, destination), ())
        await self.update_finished()

    async def _replace_one(self, old: Supervisor, destination: Place | None = None) -> None:
        new = await self._join(self.spec, (old.number,), (old,), destination)
        self._past_restarts += old.restarts + 1
        await self._switch(new, leaving=(old,))
        self._workers.sort(key=lambda each: each.number)  # scaling down ends the highest numbers

    def _on_over_memory(self, reason: str) -> None:
        log.warning("over memory: %s", reason, extra={"instance": self.spec.name})
        self.on_incident(Incident(event="over_memory", reason=reason, at=now_rfc3339()))

    def _publish(self) -> None:
        if self._is_forgotten:
            return
        serving = self._serving
        model = next((each.model for each in serving if each.model), None)
        if model is not None:
            self._serves = tuple(dict.fromkeys((model.kind, *model.outputs)))
        declared = (self.spec.kind,) if self.spec.kind else ()
        entry = RouteEntry(
            name=self.spec.name,
            model_id=self.spec.model_id,
            state=self.state,
            reason=next((each.reason for each in serving if each.reason), None),
            dimension=model.dimension if model else 0,
            endpoints=() if self._is_unloading else tuple(self._endpoints()),
            serves=self._serves or declared,
            on_demand=self._loads_on_demand,
            space_settings=self.spec.space_settings,
        )
        self._directory.publish(entry)

    def _endpoints(self) -> Iterator[WorkerEndpoint]:
        """The addresses of the replicas that get calls."""
        running = [(each, each.health) for each in self._serving if each.health is not None]
        healths = [health for _, health in running]
        for each, health in running:
            if each.endpoint is not None and is_routable(health, healths):
                yield each.endpoint
