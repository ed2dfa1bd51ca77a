"""One task per replica: events from the mailbox go into its `Life`, effects come out and are carried out.

Nobody else changes anything of the replica. Handling an event waits for nothing, so the mailbox stays short however
long a launch or a stop takes: those are the attempt's, and come back as events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from teimgr.clock import rfc3339
from teimgr.config.settings import Settings
from teimgr.directory import Directory, WorkerEndpoint
from teimgr.errors import AlreadyRunning, InstanceNotFound, NotRunning, TeimgrError, Unavailable
from teimgr.launch.launcher import Adopted, Launcher
from teimgr.observability.metrics import Metrics
from teimgr.spec import InstanceSpec, ModelInfo, State, WorkerSpec, WorkerView
from teimgr.supervision.lifecycle import Backoff, CommandRefused, Life, Phase, RestartPolicy
from teimgr.supervision.lifecycle_events import (
    Adopt,
    Command,
    Effect,
    Event,
    Exited,
    Gone,
    HandOver,
    Kill,
    Launch,
    News,
    ProbeFailed,
    ProbeOk,
    Stop,
    Terminate,
    Tick,
    WorkerReady,
)
from teimgr.supervision.worker_run import ProbePlan, WorkerRun


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorContext:
    """What every supervisor is given alike. `grace_s` is what a stop allows for finishing calls."""

    launcher: Launcher
    directory: Directory
    metrics: Metrics
    policy: RestartPolicy
    probes: ProbePlan
    grace_s: float
    on_fleet_changed: Callable[[], None]


def policy_of(settings: Settings) -> RestartPolicy:
    """The numbers of supervision that the settings say."""
    return RestartPolicy(
        startup_timeout_s=settings.startup_timeout_secs,
        max_probe_failures=settings.max_failures_before_restart,
        backoff=Backoff(first_s=settings.restart_backoff_secs, max_s=settings.restart_backoff_max_secs),
    )


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ask:
    command: Command
    answer: asyncio.Future[None]


class Supervisor:
    """The owner of one replica, the `number`-th of an instance as `spec` has it.

    `plan` says, at each launch, what the worker is to be told; `on_state_changed` is called in the loop at
    every change of state. `gpu` is the card that the present worker was or the next one is to be placed on. `started`
    is set once `run` has taken over, an adopted worker included.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        number: int,
        plan: Callable[[Supervisor], Awaitable[WorkerSpec]],
        around: SupervisorContext,
        on_state_changed: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.number = number
        self.gpu: str | None = None
        self._plan = plan
        self._around = around
        self._on_state_changed = on_state_changed
        self._life = Life(policy=self._policy())
        # Not bounded by a number: each event is handled at once, and its senders are few.
        self._mailbox: asyncio.Queue[_Ask | News] = asyncio.Queue()
        self._settled = asyncio.Condition()
        self._attempt: WorkerRun | None = None
        self._attempts: asyncio.TaskGroup | None = None
        self._threads: int | None = None
        self._model: ModelInfo | None = None
        self._probed_at: datetime | None = None
        self.started = asyncio.Event()
        self._closed = False

    # What the instance asks

    async def accept(self, command: Command) -> None:
        """Have the command taken up; its outcome is another matter, `settle`.

        Raises:
            AlreadyRunning, NotRunning, InstanceNotFound: it makes no sense now.
        """
        if self._closed:
            raise self._absence()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._mailbox.put_nowait(_Ask(command, answer))
        await answer

    async def settle(self) -> None:
        """Return as soon as no process is on its way out."""
        async with self._settled:
            await self._settled.wait_for(lambda: self._closed or not self._life.is_ending)

    @property
    def state(self) -> State:
        """The word for where the replica is."""
        return self._life.phase.state

    @property
    def is_wanted(self) -> bool:
        """Whether there is to be a worker."""
        return self._life.is_wanted

    @property
    def has_failed(self) -> bool:
        """Whether the last worker is of no use, and there is no other yet."""
        return self._life.phase in (Phase.FAILED, Phase.WAITING, Phase.REPLACING) or self._life.verdict is not None

    @property
    def restarts(self) -> int:
        """How often a worker of it was followed by another."""
        return self._life.restarts

    @property
    def reason(self) -> str | None:
        """What to tell users of it."""
        return self._life.reason

    @property
    def model(self) -> ModelInfo | None:
        """What the last worker that was ready said of its model."""
        return self._model

    @property
    def threads(self) -> int | None:
        """The CPU threads of its worker, while there is one."""
        return self._threads if self._attempt and self._attempt.handle else None

    @property
    def endpoint(self) -> WorkerEndpoint | None:
        """Where its worker answers, while it serves."""
        handle = self._attempt.handle if self._attempt else None
        if handle is None or self._life.phase is not Phase.RUNNING:
            return None
        return WorkerEndpoint(str(handle.socket), handle.incarnation)

    def view(self, role: str) -> WorkerView:
        """A snapshot for display."""
        life, handle = self._life, self._attempt.handle if self._attempt else None
        return WorkerView(
            replica=self.number,
            role=role,
            state=self.state,
            gpu=self.gpu,
            pid=handle.pid if handle else None,
            incarnation=handle.incarnation if handle else None,
            uptime_secs=max(0, int(time.time() - handle.started_at)) if handle else None,
            restarts=life.restarts,
            health_check_failures=life.probe_failures,
            last_health_check=rfc3339(self._probed_at) if self._probed_at else None,
            reason=life.reason,
        )

    def respecify(self, spec: InstanceSpec) -> None:
        """Take `spec` for that of the present worker too; it differs in nothing that a worker is told."""
        self.spec = spec
        self._life = replace(self._life, policy=self._policy())

    def set_threads(self, threads: int) -> None:
        """The worker's share of the CPU, for the worker that runs and those that follow."""
        self._threads = threads
        if self._attempt is not None:
            self._attempt.set_threads(threads)

    def hurry(self) -> None:
        """Skip the grace of whatever is ending."""
        if self._attempt is not None and self._life.is_ending:
            self._attempt.end(0.0)

    def give_up(self, reason: str) -> None:
        """Make the replica one that has failed, before `run`: it cannot even be tried."""
        self._life = Life.failed(self._life.policy, reason)

    # The task

    async def run(self, adopted: Adopted | None = None) -> None:
        """Supervise until the replica is deleted, or the task is cancelled, which leaves the worker alone."""
        try:
            async with asyncio.TaskGroup() as self._attempts:
                if adopted is not None:
                    self._adopt(adopted)
                self.started.set()
                while not self._is_gone:
                    await self._handle(await self._next())
        finally:
            await self._close()

    @property
    def _is_gone(self) -> bool:
        return self._life.deleted and self._life.phase is Phase.STOPPED

    def _adopt(self, adopted: Adopted) -> None:
        self.gpu = adopted.handle.spec.gpu
        self._step(Adopt())
        self._begin(adopted)
        assert self._attempt is not None
        if self._attempt.is_ready:
            self._step(WorkerReady())  # at once: routers must not see it otherwise for a moment

    async def _close(self) -> None:
        self._closed = True
        self.started.set()
        while not self._mailbox.empty():
            item = self._mailbox.get_nowait()
            if isinstance(item, _Ask) and not item.answer.done():
                item.answer.set_exception(self._absence())
        async with self._settled:
            self._settled.notify_all()

    async def _next(self) -> _Ask | News:
        try:
            async with asyncio.timeout_at(self._life.wake_at):
                return await self._mailbox.get()
        except TimeoutError:
            return Tick()

    async def _handle(self, item: _Ask | News) -> None:
        if isinstance(item, _Ask):
            self._obey(item)
        else:
            self._note(item)
            self._step(item)
        async with self._settled:
            self._settled.notify_all()

    def _obey(self, ask: _Ask) -> None:
        try:
            self._step(ask.command)
        except CommandRefused:
            if not ask.answer.done():
                ask.answer.set_exception(self._refusal(ask.command))
            return
        if not ask.answer.done():
            ask.answer.set_result(None)

    def _absence(self) -> TeimgrError:
        if self._is_gone:
            return InstanceNotFound(self.spec.name)
        return Unavailable(f"Instance '{self.spec.name}' is not supervised any more")

    def _refusal(self, command: Command) -> TeimgrError:
        state = self.state.value
        if self._life.deleted:
            return InstanceNotFound(self.spec.name)
        return NotRunning(self.spec.name, state) if isinstance(command, Stop) else AlreadyRunning(self.spec.name, state)

    def _note(self, news: News) -> None:
        """Facts that the view and the metrics show and that decide nothing."""
        match news:
            case ProbeOk():
                self._probed_at = datetime.now(UTC)
            case ProbeFailed(reason):
                self._around.metrics.health_check_failed(self.spec.name)
                log.warning("probe failed", extra={"instance": self.spec.name, "reason": reason})
            case Exited():
                self._attempt = None

    def _step(self, event: Event) -> None:
        before = self._life
        self._life, effects = before.step(event, self._now())
        if before.phase is not self._life.phase:
            self._turned(before.phase)
        self._on_state_changed()
        for effect in effects:
            self._carry_out(effect)

    def _turned(self, before: Phase) -> None:
        life = self._life
        facts = {"instance": self.spec.name, "replica": self.number}
        facts |= {"from": before.name.lower(), "to": life.phase.name.lower()}
        level = logging.ERROR if life.phase is Phase.FAILED else logging.INFO
        log.log(level, "phase", extra=facts | ({"reason": life.reason} if life.reason else {}))
        if life.phase is Phase.WAITING:
            self._around.metrics.instance_restarted(self.spec.name)
        if life.phase is Phase.RUNNING:
            self._became_ready()

    def _became_ready(self) -> None:
        assert self._attempt is not None
        self._model = self._attempt.status.model if self._attempt.status else None
        if self._attempt.handle is not None and not self._attempt.is_adopted:
            seconds = max(0.0, time.time() - self._attempt.handle.started_at)
            self._around.metrics.worker_started(self.spec.name, seconds)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Launch():
                self._begin(None)
            case Terminate():
                self._end(self._around.grace_s)
            case HandOver():
                self._end(self._around.grace_s, handover=True)
            case Kill():
                self._end(0.0)
            case Gone():
                pass  # which ends `run`

    def _begin(self, adopted: Adopted | None) -> None:
        assert self._attempts is not None
        around = self._around
        plan = partial(self._plan, self)
        self._attempt = WorkerRun(around.launcher, plan, around.probes, self._mailbox.put_nowait, adopted)
        if self._threads is not None:
            self._attempt.set_threads(self._threads)
        self._attempts.create_task(self._attempt.run(), name=f"attempt of {self.spec.name}")

    def _end(self, grace_s: float, *, handover: bool = False) -> None:
        if self._attempt is not None:
            self._attempt.end(grace_s, handover=handover)

    def _policy(self) -> RestartPolicy:
        timeout_s = self.spec.startup_timeout_secs or self._around.policy.startup_timeout_s
        return replace(self._around.policy, startup_timeout_s=timeout_s)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
