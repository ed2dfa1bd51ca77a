"""What is wanted under one name, and the replicas that serve it.

An instance has a crew: a supervisor for each replica. They serve side by side, and one that crashes is no matter of the
others. A change that needs other workers makes a second crew beside the first:

    join      the new workers start and prove themselves; the old ones serve, and if a new one fails, go on
    commit    the state file says what is wanted from now on
    flip      routers are told of the new workers, and of them alone
    leave     the old workers serve who has not heard yet, finish what they have, and end

A crash of the daemon before the commit leaves the old crew wanted, after it the new one; the next daemon ends the
other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from teimgr.clock import now_rfc3339
from teimgr.config.settings import Settings
from teimgr.directory import RouteEntry
from teimgr.errors import InstanceNotFound, TeimgrError, UpdateFailed, UpdateInProgress
from teimgr.launch.launcher import Adopted
from teimgr.placement.planner import worker_spec
from teimgr.spec import KEYS, WORKER_KEYS, Change, InstanceSpec, InstanceView, State, UpdateView, WorkerSpec
from teimgr.supervision.lifecycle_events import Command, Delete, Restart, Retire, Start, Stop
from teimgr.supervision.supervisor import Supervisor, SupervisorContext


def with_changes(spec: InstanceSpec, changes: Mapping[str, Any]) -> InstanceSpec:
    """`spec` with `changes`; a key that is None goes back to its default."""
    blank = InstanceSpec(name=spec.name, model_id=spec.model_id)
    values = {key: getattr(blank, key) if value is None else value for key, value in changes.items()}
    return replace(spec, **values)


def change_needed(old: InstanceSpec, new: InstanceSpec, settings: Settings) -> Change:
    """What an update from `old` to `new` needs, by the declared keys and by what the workers are launched with.

    Raises:
        InvalidConfig: An extra argument of `new` is invalid.
    """
    launched = [worker_spec(spec, settings, gpu_uuid=None, threads=1) for spec in (old, new)]
    if launched[0].hash != launched[1].hash:
        return Change.REPLACE
    others = [name for name in KEYS if name not in (*WORKER_KEYS, "extra_args")]
    return max(
        (KEYS[name].change for name in others if getattr(old, name) != getattr(new, name)), default=Change.IN_PLACE
    )


log = logging.getLogger(__name__)

Plan = Callable[[Supervisor], Awaitable[WorkerSpec]]
Save = Callable[[], Awaitable[None]]

# What an instance is whose replicas are not all in one state: the first of these that one of them is in.
_PRECEDENCE = (State.RUNNING, State.STARTING, State.STOPPING, State.FAILED, State.STOPPED)


class ManagedInstance:
    """The owner of one name. `plan` says what each worker is told, `save` has the disk say what is wanted."""

    def __init__(self, spec: InstanceSpec, replicas: int, plan: Plan, save: Save, around: SupervisorContext) -> None:
        self.spec = spec
        self._plan = plan
        self._save = save
        self._around = around
        self._joining: list[Supervisor] = []
        self._leaving: list[Supervisor] = []
        self._tasks: dict[Supervisor, asyncio.Task[None]] = {}
        self._restarts = 0  # those of workers that have left
        self._update: UpdateView | None = None
        self._updating: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # of commands and changes
        self._news = asyncio.Event()
        self._is_committed = False  # the change: from here on it goes to its end
        self._is_deleted = False
        self._forgotten = False
        self._crew = self._recruit(spec, range(replicas))
        self._publish()

    # How it is

    @property
    def state(self) -> State:
        """Running while one replica is."""
        states = {each.state for each in self._crew}
        state = next(state for state in _PRECEDENCE if state in states)
        return State.STARTING if state is State.STOPPED and self._joining else state

    @property
    def supervisors(self) -> list[Supervisor]:
        """Those of all workers there are or are to be, of either crew."""
        return [*self._crew, *self._joining]

    @property
    def is_supervised(self) -> bool:
        """Whether it was begun, and is not gone."""
        return bool(self._tasks)

    def mates(self, supervisor: Supervisor) -> list[Supervisor]:
        """The others of its crew."""
        crew = self._joining if supervisor in self._joining else self._crew
        return [each for each in crew if each is not supervisor]

    def view(self) -> InstanceView:
        """A snapshot for display; where there is one value for several workers, it is that of the first that serves."""
        crew = [each.view("serving") for each in self._crew]
        rank = {State.RUNNING: 0, State.STARTING: 1, State.STOPPING: 1}
        face, shown = min(zip(self._crew, crew, strict=True), key=lambda pair: rank.get(pair[1].state, 2))
        others = [each.view("joining") for each in self._joining] + [each.view("leaving") for each in self._leaving]
        return InstanceView(
            spec=self.spec,
            state=self.state,
            pid=shown.pid,
            uptime_secs=shown.uptime_secs,
            restarts=self._restarts + sum(each.restarts for each in crew),
            health_check_failures=sum(each.health_check_failures for each in crew),
            last_health_check=max((each.last_health_check for each in crew if each.last_health_check), default=None),
            reason=next((each.reason for each in crew if each.reason), None),
            model=face.model,
            threads=face.threads,
            workers=(*crew, *others),
            update=self._update,
        )

    # What the manager asks

    async def begin(self, replicas: int, adopted: Mapping[int, Adopted]) -> None:
        """Supervise `replicas` of them, with the workers that were found alive, by replica."""
        self._crew += self._recruit(self.spec, range(len(self._crew), replicas))
        for each in self._crew:
            self._supervise(each, adopted.get(each.number))
        await asyncio.gather(*(each.started.wait() for each in self._crew))

    async def start_missing(self) -> None:
        """Start the replicas that have no worker, and are not known to fail."""
        for each in self._crew:
            if each.state is State.STOPPED:
                await each.accept(Start())

    async def accept(self, command: Command, *, wanted_stays: bool = False) -> None:
        """Have every replica take the command up; its outcome is another matter, `settle`.

        It is the user's last word on whether the instance is wanted running, unless `wanted_stays`. A change whose new
        workers have not taken over is given up, but for a start.

        Raises:
            AlreadyRunning, NotRunning, InstanceNotFound: it makes no sense now, for none of them.
        """
        async with self._turn:
            if isinstance(command, Stop | Restart | Delete):
                await self._give_up_update()
            answers = await asyncio.gather(*(each.accept(command) for each in self._crew), return_exceptions=True)
            refusals = [answer for answer in answers if isinstance(answer, BaseException)]
            if len(refusals) == len(answers):
                raise refusals[0]
            self._is_deleted |= isinstance(command, Delete)
            if not wanted_stays:
                self.spec = replace(self.spec, wanted_running=any(each.is_wanted for each in self._crew))

    async def settle(self) -> InstanceView:
        """The view, as soon as no process is on its way out."""
        await asyncio.gather(*(each.settle() for each in (*self._crew, *self._leaving)))
        return self.view()

    def set_threads(self, threads: int) -> None:
        """The share of the CPU of each worker, of those that run and those that follow."""
        for each in self.supervisors:
            each.set_threads(threads)

    def hurry(self) -> None:
        """Skip the grace of whatever is ending."""
        for each in (*self.supervisors, *self._leaving):
            each.hurry()

    def give_up(self, reason: str) -> None:
        """Make the instance one that has failed, before `begin`: it cannot even be tried."""
        for each in self._crew:
            each.give_up(reason)
        self._publish()

    def close(self) -> list[asyncio.Task[None]]:
        """Supervise no more; the workers stay as they are. The result are the tasks that this ends."""
        for task in self._tasks.values():
            task.cancel()
        return [*self._tasks.values()]

    async def gone(self) -> None:
        """Return when the last supervisor of a deleted instance has ended."""
        if self._tasks:
            await asyncio.wait([*self._tasks.values()])

    def forget(self) -> None:
        """Leave the directory for good."""
        self._forgotten = True
        self._around.directory.remove(self.spec.name)

    # Changes

    async def change(
        self, make: Callable[[InstanceSpec], tuple[InstanceSpec, int, Change]], keys: tuple[str, ...], *, recreate: bool
    ) -> None:
        """Begin to be what `make` says of the present spec: another one, its replicas, and what that needs.

        With `recreate` the old workers end before the new ones start. `update_finished` waits for the end; what
        needs no new worker is over when this returns.

        Raises:
            InstanceNotFound: it is being deleted.
            UpdateInProgress: another change is under way.
        """
        async with self._turn:
            if self._is_deleted:
                raise InstanceNotFound(self.spec.name)
            if self._updating is not None and not self._updating.done():
                raise UpdateInProgress(self.spec.name)
            spec, replicas, needs = make(self.spec)
            self._update = UpdateView(state="rolling", changes=keys, started_at=now_rfc3339())
            self._is_committed = False
            work = self._carry_out(spec, replicas, needs, recreate=recreate)
            self._updating = asyncio.create_task(self._conclude(work), name=f"update of {spec.name}")
            if needs is Change.IN_PLACE or not self.spec.wanted_running:
                await asyncio.wait({self._updating})

    async def update_finished(self) -> None:
        """Return when no change is under way.

        Raises:
            UpdateFailed: the last one came to nothing.
        """
        if self._updating is not None:
            await asyncio.wait({self._updating})
        if self._update is not None and self._update.state == "failed":
            raise UpdateFailed(f"Instance '{self.spec.name}' is as it was: {self._update.reason}")

    async def _conclude(self, work: Awaitable[None]) -> None:
        state, reason = "failed", "given up: the instance was told otherwise meanwhile"
        try:
            await work
            state, reason = "done", ""
        except TeimgrError as error:
            reason = error.message
        finally:
            assert self._update is not None
            self._update = replace(self._update, state=state, reason=reason or None, finished_at=now_rfc3339())
            facts = {"instance": self.spec.name, "state": state, "changes": self._update.changes, "reason": reason}
            log.log(logging.INFO if state == "done" else logging.WARNING, "update", extra=facts)
            self._on_state_changed()

    async def _carry_out(self, spec: InstanceSpec, replicas: int, needs: Change, *, recreate: bool) -> None:
        if needs is Change.REPLACE:
            await self._replace(spec, replicas, recreate=recreate)
        elif replicas > len(self._crew):
            await self._grow(spec, replicas)
        else:
            await self._commit(spec)
            self._crew, surplus = self._crew[:replicas], self._crew[replicas:]
            for each in self._crew:
                each.respecify(spec)
            self._publish()
            await self._retire(surplus)

    async def _replace(self, spec: InstanceSpec, replicas: int, *, recreate: bool) -> None:
        old, is_restart, pause = self._crew, spec == self.spec, recreate and self.spec.wanted_running
        if pause:
            await self._pause(old)
        try:
            fresh = await self._join(spec, range(replicas))
        except BaseException:
            if pause:
                await self._each(old, Start())
            raise
        self._restarts += sum(each.restarts for each in old) + is_restart
        self._crew, self._joining = fresh, []
        self._publish()
        await self._retire(old)

    async def _grow(self, spec: InstanceSpec, replicas: int) -> None:
        fresh = await self._join(spec, range(len(self._crew), replicas))
        for each in self._crew:
            each.respecify(spec)
        self._crew, self._joining = [*self._crew, *fresh], []
        self._publish()

    async def _join(self, spec: InstanceSpec, numbers: Iterable[int]) -> list[Supervisor]:
        """A crew of which every worker has proved itself, and which is wanted from now on; or none, and as before.

        Raises:
            UpdateFailed: a worker of it failed.
        """
        self._joining = fresh = self._recruit(spec, numbers)
        for each in fresh:
            self._supervise(each, None)
        before = self.spec
        try:
            if before.wanted_running:
                await self._each(fresh, Start())
                await self._proved(fresh)
            await self._commit(spec)
        except BaseException:
            self.spec = before
            await self._dismiss(fresh)
            raise
        return fresh

    async def _proved(self, crew: Iterable[Supervisor]) -> None:
        while True:
            self._news.clear()
            for each in crew:
                if each.has_failed or each not in self._tasks:
                    raise UpdateFailed(each.reason or "the new worker failed")
            if all(each.state is State.RUNNING for each in crew):
                return
            await self._news.wait()

    async def _commit(self, spec: InstanceSpec) -> None:
        self._is_committed = True
        self.spec = spec
        await self._save()

    async def _pause(self, crew: Iterable[Supervisor]) -> None:
        await self._each(crew, Stop())
        await asyncio.gather(*(each.settle() for each in crew))

    async def _retire(self, crew: Iterable[Supervisor]) -> None:
        self._leaving += crew
        await self._each(crew, Retire())

    async def _dismiss(self, crew: list[Supervisor]) -> None:
        """End what has not served; when this returns it is gone."""
        await self._each(crew, Delete())
        if tasks := [self._tasks[each] for each in crew if each in self._tasks]:
            await asyncio.wait(tasks)
        self._joining = []

    async def _each(self, crew: Iterable[Supervisor], command: Command) -> None:
        for each in crew:
            with suppress(TeimgrError):  # one for which it makes no sense is where it should be
                await each.accept(command)

    async def _give_up_update(self) -> None:
        """End the change that is under way; one that is committed is over in a moment, and no worker is left behind."""
        if self._updating is not None and not self._updating.done():
            if not self._is_committed:
                self._updating.cancel()
            await asyncio.wait({self._updating})

    # Supervisors

    def _recruit(self, spec: InstanceSpec, numbers: Iterable[int]) -> list[Supervisor]:
        return [Supervisor(spec, number, self._plan, self._around, self._on_state_changed) for number in numbers]

    def _supervise(self, supervisor: Supervisor, adopted: Adopted | None) -> None:
        name = f"supervisor of {self.spec.name}, replica {supervisor.number}"
        task = self._tasks[supervisor] = asyncio.create_task(supervisor.run(adopted), name=name)
        task.add_done_callback(lambda task: self._ended(supervisor, task))

    def _ended(self, supervisor: Supervisor, task: asyncio.Task[None]) -> None:
        del self._tasks[supervisor]
        if supervisor in self._leaving:
            self._leaving.remove(supervisor)
        if not task.cancelled() and (error := task.exception()):
            log.critical("supervisor ended by a defect", exc_info=error, extra={"task": task.get_name()})
        self._news.set()

    def _on_state_changed(self) -> None:
        self._news.set()
        self._publish()
        self._around.on_fleet_changed()

    def _publish(self) -> None:
        if self._forgotten:
            return
        endpoints = (each.endpoint for each in self._crew)
        model = next((each.model for each in self._crew if each.model), None)
        entry = RouteEntry(
            name=self.spec.name,
            model_id=self.spec.model_id,
            state=self.state,
            reason=next((each.reason for each in self._crew if each.reason), None),
            dimension=model.dimension if model else 0,
            endpoints=tuple(endpoint for endpoint in endpoints if endpoint is not None),
        )
        self._around.directory.publish(entry)
