"""State machine of one replica, as a pure function of events and time.

`Life.step` is the only place where the state changes. It does no I/O and reads no clock: events go in, effects come
out, which the supervisor carries out. It does not know which replica it is, nor of others.

`TRANSITION_TABLE` is parsed into `TRANSITIONS`. A command at `refused` raises; an observation at `-` concerns a worker
that has ended, and changes nothing. What the data plane sees follows from the phase (an endpoint in RUNNING only), so
no effect exists for it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import assert_never

from teimgr.launch.launcher import Exit
from teimgr.spec import State

_SIGNALS = {number.value: number.name for number in signal.Signals}

# Commands: from users and the manager.


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take over the live worker of an earlier daemon."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the worker."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Replace the worker."""


@dataclass(frozen=True, slots=True)
class Delete:
    """End the worker for good."""


@dataclass(frozen=True, slots=True)
class Retire:
    """End the worker for good, as others serve in its place."""


# News: from the worker and the clock.


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Why a worker failed. `permanent`: every new worker would fail in the same way."""

    message: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker has run a known text through its device."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker reported a failure, and will exit."""

    failure: FailureCause


@dataclass(frozen=True, slots=True)
class WorkerDownloading:
    """The worker's download makes progress; the time does not count against the start."""


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """The worker accepts no more calls, and will exit."""


@dataclass(frozen=True, slots=True)
class ProbeOk:
    """A health probe succeeded."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """A health probe failed or timed out."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone, or could not be started. `jitter` is a fresh random number in [0, 1)."""

    exit: Exit
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; `wake_at` may be over."""


Command = Start | Adopt | Stop | Restart | Delete | Retire
Observation = WorkerReady | WorkerFailed | WorkerDownloading | WorkerDraining | ProbeOk | ProbeFailed | Exited | Tick
Event = Command | Observation

# Effects: for the supervisor.


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a worker."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """Let the worker finish its calls, within the grace, then end it."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """As `Terminate`, after it has served routers that do not know its successor yet."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End the worker without grace."""


@dataclass(frozen=True, slots=True)
class Gone:
    """There is no process and none will follow: end the supervisor."""


Effect = Launch | Terminate | HandOver | Kill | Gone


def explain(exit: Exit) -> FailureCause:
    """Why a worker exited by itself: its own report, else the exit status and the last line of its log."""
    if exit.report is not None:
        return FailureCause(exit.report.message, exit.report.permanent)
    if exit.status is None:
        how = "the worker ended"
    elif exit.status < 0:
        how = f"the worker was killed by {_SIGNALS.get(-exit.status, f'signal {-exit.status}')}"
    else:
        how = f"the worker exited with status {exit.status}"
    return FailureCause(f"{how}; its log ends: {exit.log_tail}" if exit.log_tail else how)


TRANSITION_TABLE = """
                  STOPPED   STARTING          RUNNING            REPLACING                WAITING           STOPPING   FAILED
Start             STARTING  refused           refused            refused                  refused           REPLACING  STARTING
Adopt             STARTING  refused           refused            refused                  refused           refused    refused
Stop              refused   STOPPING          STOPPING           STOPPING                 STOPPED           STOPPING   STOPPED
Restart           STARTING  REPLACING         REPLACING          REPLACING                STARTING          REPLACING  STARTING
Delete            STOPPED   STOPPING          STOPPING           STOPPING                 STOPPED           STOPPING   STOPPED
Retire            STOPPED   STOPPING          STOPPING           STOPPING                 STOPPED           STOPPING   STOPPED
WorkerReady       -         STARTING|RUNNING  RUNNING            REPLACING                -                 STOPPING   -
WorkerFailed      -         STARTING          REPLACING          REPLACING                -                 STOPPING   -
WorkerDownloading -         STARTING          RUNNING            REPLACING                -                 STOPPING   -
WorkerDraining    -         REPLACING         REPLACING          REPLACING                -                 STOPPING   -
ProbeOk           -         STARTING|RUNNING  RUNNING            REPLACING                -                 STOPPING   -
ProbeFailed       -         STARTING          RUNNING|REPLACING  REPLACING                -                 STOPPING   -
Exited            -         WAITING|FAILED    WAITING|FAILED     STARTING|WAITING|FAILED  -                 STOPPED    -
Tick              STOPPED   STARTING          RUNNING            REPLACING                WAITING|STARTING  STOPPING   FAILED
"""  # noqa: E501  a table is read by its columns

FAILED_EXIT_LIMIT_S = 5.0
"""How long a worker may take to exit after it reported a failure."""


class Phase(Enum):
    """Where in its life a replica is; finer than the state in REST."""

    STOPPED = State.STOPPED  # no process, none wanted
    STARTING = State.STARTING, "loading"  # a process that is not ready yet
    RUNNING = State.RUNNING  # a process that serves
    REPLACING = State.STARTING, "replacing"  # a process that is ending; another one follows
    WAITING = State.STARTING, "waiting"  # no process; the next one starts at `wake_at`
    STOPPING = State.STOPPING  # a process that is ending; none follows
    FAILED = State.FAILED  # no process: another one would fail in the same way

    @property
    def state(self) -> State:
        """The state in REST and gRPC."""
        return self.value if isinstance(self.value, State) else self.value[0]


class CommandRefused(Exception):
    """The command is not allowed in this phase; nothing has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential backoff of restarts; a process that lived `stable_after_s` resets it."""

    first_s: float = 0.2
    max_s: float = 30.0
    stable_after_s: float = 30.0

    def delay_s(self, failures: int, jitter: float = 0.0) -> float:
        """The pause after so many failures in a row (>= 1), shortened by up to a half for a jitter in [0, 1)."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 40)) * (1 - jitter / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a worker is restarted. `max_probe_failures` 0: a failed probe never leads to a restart."""

    startup_timeout_s: float = 300.0
    max_probe_failures: int = 3
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """One replica's state. Times are those of the clock that is passed to `step`.

    `wake_at` is when a Tick is due. `verdict` is why the present worker has to end. `reason` is shown to users: why
    there is no running worker, or why there was a restart. `streak` counts failures without a stable run in between.
    """

    policy: RestartPolicy
    phase: Phase = Phase.STOPPED
    deleted: bool = False
    verdict: FailureCause | None = None
    reason: str | None = None
    restarts: int = 0
    streak: int = 0
    probe_failures: int = 0
    ready_at: float | None = None
    wake_at: float | None = None

    @classmethod
    def failed(cls, policy: RestartPolicy, reason: str) -> ReplicaState:
        """A replica that cannot be started as it is; a user may start it once the cause is removed."""
        return cls(policy=policy, phase=Phase.FAILED, reason=reason)

    @property
    def is_ending(self) -> bool:
        """Whether a process is ending."""
        return self.phase in (Phase.STOPPING, Phase.REPLACING)

    @property
    def is_wanted(self) -> bool:
        """Whether a worker is wanted."""
        return self.phase not in (Phase.STOPPED, Phase.STOPPING)

    def step(self, event: Event, now: float) -> tuple[ReplicaState, list[Effect]]:
        """The state after `event`, and the effects to carry out.

        Raises:
            CommandRefused: the command is not allowed in this phase.
        """
        allowed = TRANSITIONS[type(event)][self.phase]
        refused = not allowed or (self.deleted and not isinstance(event, Delete | Retire))
        if isinstance(event, Command) and refused:
            raise CommandRefused
        life, effects = self._take(event, now) if allowed else (self, [])
        assert not allowed or life.phase in allowed, (self.phase, event, life.phase)
        return life, effects

    def _take(self, event: Event, now: float) -> tuple[ReplicaState, list[Effect]]:
        match event:
            case Start():
                return self._start(now)
            case Adopt():
                return self._loading(now), []
            case Stop():
                return self._stop()
            case Restart():
                return self._restart(now)
            case Delete():
                return replace(self, deleted=True)._stop()
            case Retire():
                return replace(self, deleted=True)._retire()
            case WorkerReady():
                return self._ready(now), []
            case WorkerFailed(failure):
                return self._worker_failed(failure, now)
            case WorkerDownloading():
                return self._downloading(now), []
            case WorkerDraining():
                return self._draining()
            case ProbeOk():
                return replace(self._ready(now), probe_failures=0), []
            case ProbeFailed(reason):
                return self._probe_failed(reason)
            case Exited(exit, jitter):
                return self._exited(exit, jitter, now)
            case Tick():
                return self._tick(now)
            case _:
                assert_never(event)

    def _loading(self, now: float) -> ReplicaState:
        deadline = now + self.policy.startup_timeout_s
        return replace(self, phase=Phase.STARTING, verdict=None, ready_at=None, probe_failures=0, wake_at=deadline)

    def _launch(self, now: float, *, again: bool) -> tuple[ReplicaState, list[Effect]]:
        return replace(self._loading(now), restarts=self.restarts + again), [Launch()]

    def _start(self, now: float) -> tuple[ReplicaState, list[Effect]]:
        if self.is_ending:
            return replace(self, phase=Phase.REPLACING, verdict=None), []
        return replace(self, streak=0, reason=None)._launch(now, again=False)

    def _stop(self) -> tuple[ReplicaState, list[Effect]]:
        cleared = replace(self, reason=None, wake_at=None)
        if self.is_ending:
            return replace(cleared, phase=Phase.STOPPING), []
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            return replace(cleared, phase=Phase.STOPPING), [Terminate()]
        return replace(cleared, phase=Phase.STOPPED), [Gone()] if self.deleted else []

    def _retire(self) -> tuple[ReplicaState, list[Effect]]:
        life, effects = self._stop()
        return life, [HandOver()] if self.phase is Phase.RUNNING else effects

    def _restart(self, now: float) -> tuple[ReplicaState, list[Effect]]:
        fresh = replace(self, streak=0, reason=None, verdict=None)
        if self.is_ending:
            return replace(fresh, phase=Phase.REPLACING), []
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            return replace(fresh, phase=Phase.REPLACING, wake_at=None), [Terminate()]
        return fresh._launch(now, again=True)

    def _ready(self, now: float) -> ReplicaState:
        if self.phase is not Phase.STARTING or self.verdict is not None:
            return self
        return replace(self, phase=Phase.RUNNING, ready_at=now, wake_at=None, reason=None)

    def _worker_failed(self, failure: FailureCause, now: float) -> tuple[ReplicaState, list[Effect]]:
        if self.is_ending:
            return self, []
        life = replace(self, verdict=failure, reason=failure.message)
        if self.phase is Phase.RUNNING:
            return replace(life, phase=Phase.REPLACING), [Kill()]
        return replace(life, wake_at=now + FAILED_EXIT_LIMIT_S), []

    def _draining(self) -> tuple[ReplicaState, list[Effect]]:
        if self.is_ending:
            return self, []
        verdict = FailureCause("the worker was asked to end by another process")
        life = replace(self, phase=Phase.REPLACING, verdict=verdict, reason=verdict.message, wake_at=None)
        return life, [Terminate()]

    def _downloading(self, now: float) -> ReplicaState:
        if self.phase is not Phase.STARTING or self.verdict is not None:
            return self
        return replace(self, wake_at=now + self.policy.startup_timeout_s)

    def _probe_failed(self, reason: str) -> tuple[ReplicaState, list[Effect]]:
        if self.phase is not Phase.RUNNING:
            return self, []
        life = replace(self, probe_failures=self.probe_failures + 1)
        if not 0 < self.policy.max_probe_failures <= life.probe_failures:
            return life, []
        verdict = FailureCause(f"{life.probe_failures} health probes in a row failed: {reason}")
        # No grace: a worker that does not answer probes will not finish calls either.
        return replace(life, phase=Phase.REPLACING, verdict=verdict, reason=verdict.message), [Kill()]

    def _exited(self, exit: Exit, jitter: float, now: float) -> tuple[ReplicaState, list[Effect]]:
        if self.phase is Phase.STOPPING:
            return replace(self, phase=Phase.STOPPED), [Gone()] if self.deleted else []
        if self.phase is Phase.REPLACING and self.verdict is None:
            return self._launch(now, again=True)
        verdict = self.verdict or explain(exit)
        ended = replace(self, verdict=None, reason=verdict.message, wake_at=None, probe_failures=0)
        if verdict.permanent:
            return replace(ended, phase=Phase.FAILED), []
        return ended._wait(jitter, now), []

    def _wait(self, jitter: float, now: float) -> ReplicaState:
        was_stable = self.ready_at is not None and now - self.ready_at >= self.policy.backoff.stable_after_s
        streak = 0 if was_stable else self.streak + 1
        delay_s = 0.0 if was_stable else self.policy.backoff.delay_s(streak, jitter)
        return replace(self, phase=Phase.WAITING, streak=streak, ready_at=None, wake_at=now + delay_s)

    def _tick(self, now: float) -> tuple[ReplicaState, list[Effect]]:
        if self.wake_at is None or now < self.wake_at:
            return self, []
        if self.phase is Phase.WAITING:
            return self._launch(now, again=True)
        verdict = self.verdict or FailureCause(f"not ready within {self.policy.startup_timeout_s:g} s", permanent=True)
        return replace(self, verdict=verdict, reason=verdict.message, wake_at=None), [Kill()]


def _parse_table() -> dict[type[Event], dict[Phase, frozenset[Phase]]]:
    """Event → phase before → phases after; the empty set for `refused` and `-`."""
    header, *rows = (line.split() for line in TRANSITION_TABLE.strip().splitlines())
    columns = [Phase[name] for name in header]
    events: dict[str, type[Event]] = {kind.__name__: kind for kind in (*Command.__args__, *Observation.__args__)}
    table = {events[name]: dict(zip(columns, map(_read_cell, cells), strict=True)) for name, *cells in rows}
    assert table.keys() == set(events.values())
    return table


def _read_cell(cell: str) -> frozenset[Phase]:
    return frozenset() if cell in ("refused", "-") else frozenset(Phase[name] for name in cell.split("|"))


TRANSITIONS = _parse_table()
