"""The daemon's task that loads and unloads models by the policy while calls wait.

Gateway and muxes use `loaded`, a block in which a model stays loaded. The states of instances come from the directory,
the numbers of calls from the workers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from teimgr.control.residence.events import (
    Busy,
    CallAsked,
    Decision,
    Declared,
    Deny,
    Event,
    Held,
    Kept,
    Left,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    NoRoom,
    Notice,
    Outgrown,
    Refusal,
    Refuse,
    Removed,
    Serve,
    Tick,
    Unload,
    Unloaded,
    Unloading,
    Used,
    UserStopped,
    eviction_reason,
    terms_of,
)
from teimgr.control.residence.model import Fleet, Phase, idle_until, time_left_s
from teimgr.control.residence.policy import Rehearsal, decide, waits
from teimgr.control.sharing.places import REFUSED_S
from teimgr.errors import (
    Code,
    FailedToLoad,
    InstanceNotFound,
    ModelLoadFailed,
    Overloaded,
    Stopped,
    TeimgrError,
    Unavailable,
    error_from_code,
)
from teimgr.observability.request_context import current_tenant
from teimgr.spec import Incident, InstanceSpec, RouteEntry, State, now_rfc3339
from teimgr.wire.routing.directory import Directory
from teimgr.wire.routing.on_demand import answer_call
from teimgr.wire.tenants.table import ANONYMOUS

log = logging.getLogger(__name__)

COUNT_INTERVAL_S = 2.0
"""Interval of reading the calls of loaded on-demand models; shorter while a load waits for memory."""
_URGENT_INTERVAL_S = 0.05
_ITEMS_AT_ONCE = 64  # events handled in one turn of the event loop
_LOAD_AGAIN_S = 1.0  # retry of a load that was refused before a worker started
WAIT_LIMIT_S = 300.0
"""Limit of a call's wait for its model if it has no deadline."""


class _RefusedLoad(NamedTuple):
    """A load that the ledger has refused; the future is True if it should be judged again."""

    event: NoRoom
    answer: asyncio.Future[bool]


class Owner(Protocol):
    """Starts and ends workers: the manager of the instances."""

    async def declare(self, model_id: str, key: str, value: Callable[[str], float | None]) -> str | None:
        """The name of an on-demand instance of a model, created for `key` if missing; None: calls may not load it.

        `value` are the recent calls a second of an instance, None if it has some now, or is on its way.
        """

    def spec(self, name: str) -> InstanceSpec | None:
        """The spec of an instance, None if it does not exist."""

    def load_seconds(self, name: str) -> float | None:
        """Return the load time of its model, from earlier loads, including those of earlier daemons; None without
        one."""

    def learn_load(self, name: str, seconds: float) -> None:
        """Keep how long a load took."""

    def failure(self, name: str) -> tuple[str, float | None, Code | None]:
        """Why an instance failed, and in how many seconds it is retried; None: no automatic retry.

        The third value is the code of the error for calls, where they have named a model that cannot be had.
        """

    async def give_up(self, name: str) -> None:
        """Delete a failed instance that calls had made, so that the next call has its model tried again."""

    def devices(self, name: str) -> tuple[str, ...]:
        """The card and the host that its next worker would be placed on; none where that is not known."""

    async def load(self, name: str) -> None:
        """Begin to start an unloaded instance."""

    async def unload(self, name: str, reason: str, incident: Incident | None) -> bool:
        """End the workers of an instance; False where it has calls."""

    async def usage(self, name: str) -> Mapping[str, tuple[int, int] | None]:
        """The calls of each running worker since its start, and those under way; None of one that does not answer."""

    def note(self, name: str, incident: Incident) -> None:
        """Record what happened to an instance."""


class Tenants(Protocol):
    """Facts about the tenants."""

    def callers(self, instance: str) -> Mapping[int, int]:
        """Return how much an instance's workers have computed for each tenant so far."""

    def badge(self, tenant: int) -> str:
        """A lasting pseudonym of a tenant; "" for calls without a key."""


class Residence:
    """Runs the policy for the instances of `directory`; `run` is its task, and `loaded` waits for a model."""

    def __init__(self, owner: Owner, directory: Directory, tenants: Tenants) -> None:
        self._owner = owner
        self._directory = directory
        self._tenants = tenants
        self._called: dict[str, Mapping[int, int]] = {}  # calls by tenant at the last count
        self._fleet = Fleet()
        self._entries: dict[str, RouteEntry] = {}
        self._used: dict[str, dict[str, int]] = {}  # calls by incarnation at the last count
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)
        self._mailbox: asyncio.Queue[Event | _RefusedLoad | tuple[str, RouteEntry | None]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refused_loads: defaultdict[str, list[asyncio.Future[bool]]] = defaultdict(list)
        self._count_at = 0.0
        self._is_left = False
        self._counting: asyncio.Task[None] | None = None
        for entry in directory.snapshot().entries:
            self._mailbox.put_nowait((entry.name, entry))
        directory.subscribe(lambda name, entry: self._mailbox.put_nowait((name, entry)))

    @asynccontextmanager
    async def loaded(self, instance: str, timeout_s: float | None, size_bytes: int = 0) -> AsyncIterator[None]:
        """Have an on-demand model loaded, wait for it, and keep it loaded within the block.

        Raises:
            InstanceNotFound: there is no such instance, or it was deleted meanwhile.
            Stopped, FailedToLoad: no call loads it now.
            ModelLoadFailed: nor does a later one.
            Unavailable, Overloaded: it cannot be loaded in time, or too many calls wait; with the time to come again.
        """
        limit_s = WAIT_LIMIT_S if timeout_s is None else min(timeout_s, WAIT_LIMIT_S)
        until = self._now() + limit_s
        is_model_id = self._owner.spec(instance) is None
        try:
            async with asyncio.timeout(limit_s) as limit:
                try:
                    call = await self._begin_call(instance, until)
                except InstanceNotFound:
                    if not is_model_id:
                        raise
                    # The instance made for this model id was deleted to make room for another one.
                    call = await self._begin_call(instance, until)
        except TimeoutError:
            if not limit.expired():
                raise
            error = Unavailable(f"Instance '{instance}' was not loaded within {limit_s:.3g} s")
            model = self._fleet.models.get(instance)
            error.try_after(None if model is None else time_left_s(model, self._now()))
            raise error from None
        try:
            yield
        finally:
            self._leave(call)

    async def _begin_call(self, instance: str, until: float) -> int:
        """Wait until an instance is loaded; the result is the call that keeps it so, until it leaves."""
        call = next(self._numbers)
        model, spec = self._fleet.models.get(instance), self._owner.spec(instance)
        is_over = model and model.phase is Phase.FAILED and model.retry_at is None
        if spec and spec.by_call and model and is_over and self._now() - model.since > REFUSED_S:
            await self._owner.give_up(instance)  # the hub may have the model by now
            instance = spec.model_id
        if self._owner.spec(instance) is None:  # a model id without an instance
            key = self._tenants.badge(current_tenant())
            instance = await self._owner.declare(instance, key, self._value) or instance
        answer = self._answers[call] = asyncio.get_running_loop().create_future()
        self._mailbox.put_nowait(CallAsked(call, instance, until, self._devices(instance), current_tenant()))
        try:
            await answer
        except BaseException:
            self._leave(call)
            raise
        finally:
            del answer  # breaks a cycle with its error and this frame, which keeps the payload alive
        return call

    def keep(self, instance: str, seconds: float, key: int = ANONYMOUS) -> None:
        """Keep an on-demand model for this long after the last call of a tenant, `key`; 0: not at all.

        Of the times that several tenants ask for, the longest counts.
        """
        self._mailbox.put_nowait(Kept(instance, seconds, key))

    def on_change(self, instance: str) -> None:
        """The keys of an instance may have changed: they count from now on, whether its model is loaded or not."""
        if instance in self._fleet.models and (spec := self._owner.spec(instance)) is not None:
            self._mailbox.put_nowait(Declared(instance, terms_of(spec)))

    def left_s(self, instance: str) -> float | None:
        """The time until a loaded model is unloaded if no call comes; None for one that stays."""
        model = self._fleet.models.get(instance)
        due = None if model is None else idle_until(model)
        return None if due is None else max(0.0, due - self._now())

    async def relieve(
        self, instance: str, needed_bytes: int, free_bytes: int, held: Mapping[str, int], device: str | None = None
    ) -> bool:
        """Make room for a load that the ledger has refused; True when it is to be judged again, False for never.

        `held` is what each instance holds of the `device`, which has too little.
        """
        await self._count()  # the choice of victims needs current counts
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._mailbox.put_nowait(_RefusedLoad(NoRoom(instance, needed_bytes, free_bytes, held, device), answer))
        return await answer

    def outgrown(self, instance: str, excess_bytes: int, held: Mapping[str, int], device: str | None = None) -> None:
        """Evict idle models at once, because one has grown and all exceed the budget of a device.

        `held` is what each instance holds of it.
        """
        self._mailbox.put_nowait(Outgrown(instance, excess_bytes, held, device))

    async def rehearsal(self) -> Rehearsal:
        """The fleet as it is now, to try loads in for a plan."""
        await self._count()
        return Rehearsal(self._fleet, self._now())

    def phases(self) -> Mapping[str, str]:
        """Where each on-demand model is, by the name of its instance, for display."""
        return {name: model.phase.name.lower() for name, model in self._fleet.models.items()}

    async def run(self) -> None:
        """Decide until cancelled."""
        try:
            while True:
                try:
                    async with asyncio.timeout_at(self._wake_at()):
                        item = await self._mailbox.get()
                except TimeoutError:  # counted in a task: a worker may not answer
                    self._counting = self._begin(self._on_time(), "count of calls")
                    continue
                self._on_item(item)
                if (more := self._mailbox.qsize()) == 0:
                    continue
                for _ in range(min(more, _ITEMS_AT_ONCE)):  # a daemon's start brings thousands
                    self._on_item(self._mailbox.get_nowait())
                await asyncio.sleep(0)
        finally:
            for task in self._tasks:
                task.cancel()
            for call, answer in self._answers.items():
                if not answer.done():
                    answer.set_exception(self._ending(call))
                    answer.exception()

    def leave_to_next(self) -> None:
        """The next daemon goes on with the loads: calls that wait here until the end get the time left."""
        self._is_left = True

    def _ending(self, call: int) -> Unavailable:
        if not self._is_left:
            return Unavailable("the daemon is ending")
        error = Unavailable("the daemon is being replaced, and the next one continues the load; try again")
        model = self._fleet.models.get(self._fleet.calls.get(call, ""))
        error.try_after_load(None if model is None else time_left_s(model, self._now()))
        return error

    def _on_item(self, item: Event | _RefusedLoad | tuple[str, RouteEntry | None]) -> None:
        if isinstance(item, _RefusedLoad):
            self._refused_loads[item.event.model].append(item.answer)
            self._decide(item.event)
        elif isinstance(item, tuple):
            self._on_entry(*item)
        else:
            self._decide(item)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _devices(self, name: str) -> tuple[str, ...]:
        """Where a model would be loaded, which matters while others end for a model that waits for room."""
        model = self._fleet.models.get(name)
        is_ending = any(each.phase is Phase.UNLOADING for each in self._fleet.active.values())
        return self._owner.devices(name) if is_ending and model and model.phase is Phase.UNLOADED else ()

    def _leave(self, call: int) -> None:
        if self._answers.pop(call, None) is not None:
            self._mailbox.put_nowait(Left(call))

    # Time

    def _wake_at(self) -> float | None:
        """When something is due: a tick of the policy, or a count of the loaded models' calls. None during a count."""
        if self._counting is not None and not self._counting.done():
            return None
        counted = [self._count_at] if self._countable() else []
        due = self._fleet.due()
        return min([*counted, *([due] if due is not None else [])], default=None)

    def _countable(self) -> list[str]:
        models = self._fleet.active.values()
        return [each.name for each in models if each.phase is Phase.LOADED and each.terms.on_demand]

    async def _on_time(self) -> None:
        try:
            await self._count()
        finally:
            self._set_next_count()
            self._mailbox.put_nowait(Tick())

    async def _count(self) -> None:
        """Read the calls of every loaded on-demand model from its workers."""
        names = self._countable()
        found = await asyncio.gather(*(self._owner.usage(name) for name in names), return_exceptions=True)
        for name, usage in zip(names, found, strict=True):
            is_loaded = (model := self._fleet.models.get(name)) is not None and model.phase is Phase.LOADED
            if not is_loaded or isinstance(usage, BaseException) or not any(usage.values()):
                continue  # it may have been unloaded while its workers were asked
            under_way = sum(each[1] for each in usage.values() if each is not None)
            self._decide(Used(name, self._new_calls(name, usage), under_way, self._new_callers(name)))

    def _set_next_count(self) -> None:
        waits = any(model.phase is Phase.ROOM for model in self._fleet.active.values())
        self._count_at = self._now() + (_URGENT_INTERVAL_S if waits else COUNT_INTERVAL_S)

    def _new_calls(self, name: str, usage: Mapping[str, tuple[int, int] | None]) -> int:
        """The calls that workers report beyond the last count; all of a new worker, none of the first count of all."""
        before = self._used.get(name)
        now = {worker: each[0] for worker, each in usage.items() if each is not None}
        last = now if before is None else before
        self._used[name] = {
            worker: max(now.get(worker, 0), last.get(worker, 0)) for worker in usage if worker in now or worker in last
        }  # overlapping counts may arrive in any order
        return sum(max(0, calls - last.get(worker, 0)) for worker, calls in now.items())

    def _value(self, name: str) -> float | None:
        """Recent calls a second of an instance; None if it has calls now, or is being loaded or unloaded."""
        model = self._fleet.models.get(name)
        if model is None or model.is_busy or model.phase not in (Phase.LOADED, Phase.UNLOADED):
            return None
        return model.rate(self._now())

    def _new_callers(self, name: str) -> Sequence[int]:
        """The tenants that have called a model since the last count, if one has asked how long it stays."""
        if not self._fleet.models[name].wishes:
            return ()
        before, self._called[name] = self._called.get(name, {}), self._tenants.callers(name)
        return [key for key, count in self._called[name].items() if count != before.get(key, 0)]

    def _forget_calls(self, name: str) -> None:
        """Forget the counts of workers that have ended; the next ones count from zero."""
        self._used.pop(name, None)
        self._called.pop(name, None)

    # Events

    def _on_entry(self, name: str, entry: RouteEntry | None) -> None:
        """Return the directory's entry of an instance as an event."""
        spec = self._owner.spec(name)
        if entry is None or spec is None:
            self._entries.pop(name, None)
            self._forget_calls(name)
            self._decide(Removed(name))
            return
        before = self._entries.get(name)
        self._entries[name] = entry
        self._decide(Declared(name, replace(terms_of(spec), load_s=self._owner.load_seconds(name))))
        if before is None or before.state is not entry.state or (entry.endpoints and not before.endpoints):
            self._decide(self._event(name, entry, is_known=before is not None))

    def _event(self, name: str, entry: RouteEntry, *, is_known: bool) -> Event:
        match entry.state:
            case State.RUNNING:
                self._learn_load(name)
                return Loaded(name)
            case State.STARTING:
                if entry.on_demand and is_known:  # adopted workers have counted earlier calls
                    self._used[name] = {}
                return Loading(name)
            case State.STOPPING:
                return Unloading(name)
            case State.FAILED:
                self._forget_calls(name)
                return LoadFailed(name, *self._owner.failure(name))
            case State.UNLOADED:
                self._forget_calls(name)
                return Unloaded(name)
            case State.STOPPED:
                self._forget_calls(name)
                return UserStopped(name)

    def _learn_load(self, name: str) -> None:
        """Keep the time of a load that calls have waited for."""
        model = self._fleet.models.get(name)
        if model is not None and model.phase is Phase.LOADING and model.load_began is not None:
            self._owner.learn_load(name, self._now() - model.since)
            self._decide(Declared(name, replace(model.terms, load_s=self._owner.load_seconds(name))))

    def _decide(self, event: Event) -> None:
        for decision in decide(self._fleet, event, self._now()):
            self._carry_out(decision)
        for name in [*self._refused_loads]:
            if not waits(self._fleet, name):
                self._judge_again(name, False)

    def _judge_again(self, name: str, again: bool) -> bool:
        """Answer the refused loads of an instance; False if it has none."""
        answers = [answer for answer in self._refused_loads.pop(name, ()) if not answer.done()]
        for answer in answers:
            answer.set_result(again)
        return bool(answers)

    # Decisions

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Serve(call):
                answer_call(self._answers.get(call), None)
            case Refuse():
                answer_call(self._answers.get(decision.call), error_of(decision))
            case Load(model, reason):
                if not self._judge_again(model, True):
                    self._begin(self._load(model, reason), f"load of {model}")
            case Deny(model, reason):
                log.warning("%s", reason, extra={"instance": model})
                self._judge_again(model, False)
            case Unload(model, reason, evicted_for):
                self._begin(self._unload(model, reason, evicted_for), f"unloading of {model}")
            case Held(model, holders):
                log.warning("no room for a model", extra={"instance": model, "held_by": ", ".join(holders)})
            case Notice(model, reason):
                log.warning("%s", reason, extra={"instance": model})
                self._owner.note(model, Incident(event="war", reason=reason, at=now_rfc3339()))

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, name: str, reason: str) -> None:
        """Have the model's workers started; the directory shows the outcome."""
        try:
            log.info("load", extra={"instance": name, "reason": reason})
            await self._owner.load(name)
        except Exception as error:  # waiting calls must get an error
            if not isinstance(error, TeimgrError):
                log.exception("model not loaded", extra={"instance": name})
            self._mailbox.put_nowait(LoadFailed(name, str(error) or repr(error), _LOAD_AGAIN_S))
            await asyncio.sleep(_LOAD_AGAIN_S)
            entry, model = self._entries.get(name), self._fleet.models.get(name)
            if entry and model and entry.state is State.UNLOADED and model.phase is Phase.FAILED:
                self._mailbox.put_nowait(Unloaded(name))

    async def _unload(self, name: str, reason: str, evicted_for: str | None) -> None:
        incident = None
        if evicted_for is not None:
            incident = Incident(event="evicted", reason=eviction_reason(reason, evicted_for), at=now_rfc3339())
        done = False
        try:
            done = await self._owner.unload(name, reason, incident)
        except Exception as error:  # also a defect: else its calls, and the model that needs its memory, wait for ever
            if not isinstance(error, TeimgrError):
                log.exception("a model was not unloaded", extra={"instance": name})
        log.info(
            "unload" if done else "not unloaded: it has calls or is pinned",
            extra={"instance": name, "reason": reason},
        )
        if not done:
            entry = self._entries.get(name)
            is_loading = entry is not None and entry.state is State.STARTING  # its load was to be given up, and goes on
            self._mailbox.put_nowait(Loading(name) if is_loading else Busy(name))


def error_of(refusal: Refuse) -> TeimgrError:
    """The error that a refused call gets."""
    match refusal.why:
        case Refusal.UNKNOWN:
            error: TeimgrError = InstanceNotFound("")
            error.reword(refusal.reason)
        case Refusal.STOPPED:
            error = Stopped(refusal.reason)
        case Refusal.FAILED if refusal.code is not None:
            error = error_from_code(refusal.code, refusal.reason)
        case Refusal.FAILED if refusal.retry_after_s is None:
            error = ModelLoadFailed(refusal.reason)
        case Refusal.FAILED:
            error = FailedToLoad(refusal.reason)
        case Refusal.QUEUE:
            error = Overloaded(refusal.reason)
        case _:
            error = Unavailable(refusal.reason)
    is_untold = refusal.why in (Refusal.NO_ROOM, Refusal.STOPPED)
    error.try_after_load(TeimgrError.UNTOLD if is_untold else refusal.retry_after_s)
    return error
