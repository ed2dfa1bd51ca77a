"""State machine of one replica, or of one mux, as a pure function of events and time.

Only `ReplicaState.step` changes the state. It does no I/O and reads no clock: it takes an event and returns effects,
which the supervisor executes.

`TRANSITION_TABLE` is parsed into `TRANSITIONS`. A command at `refused` raises. An observation at `-` is about a worker
that has ended and changes nothing. Routing depends on phase and health (`is_routable`), so it needs no effect.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import assert_never

from teimgr.control.launch.process_handle import Exit
from teimgr.errors import Code
from teimgr.spec import State

# Failures with an external cause that may go away, such as a full device or disk.
_MAY_PASS = (Code.OUT_OF_DEVICE_MEMORY, Code.STORAGE_FULL, Code.KILLED_FOR_MEMORY)
SIGNALS = {number.value: number.name for number in signal.Signals}


class Command(Enum):
    """Orders from users and the manager; the value is the name of its row in the table."""

    START = "Start"
    ADOPT = "Adopt"  # take over the live worker of an earlier daemon
    STOP = "Stop"
    RESTART = "Restart"  # replace the worker
    DELETE = "Delete"  # end the worker for good
    RETIRE = "Retire"  # end the worker for good, since others serve in its place


# Observations, from the worker and the clock.


@dataclass(frozen=True, slots=True)
class FailureCause:
    """The cause of a worker's failure. `permanent`: every new worker would fail in the same way.

    `may_pass`: an immediate restart would fail too, but a later one may not (full device, slow disk). The replica is
    failed and tried again after a pause of `LATER`. `code` is the `errors.Code` reported by the worker.
    """

    message: str
    permanent: bool = False
    may_pass: bool = False
    code: int | None = None

    @classmethod
    def reported(cls, message: str, code: int | None, permanent: bool) -> FailureCause:
        """Make the cause of a failure that a worker reported, with the number of its `errors.Code`."""
        return cls(message, permanent, may_pass=code in _MAY_PASS, code=code)


@dataclass(frozen=True, slots=True)
class LoadBegan:
    """The worker has its load slot and is being launched; its startup timeout begins."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker has computed a known text on its device."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker reported a failure, and will exit."""

    failure: FailureCause


@dataclass(frozen=True, slots=True)
class WorkerDownloading:
    """The worker's download progresses, which restarts its startup timeout."""


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """The worker accepts no more calls, and will exit."""


@dataclass(frozen=True, slots=True)
class ProbeOk:
    """A health probe succeeded."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """A health probe failed.

    `missed`: no answer, because the worker hangs or the machine is overloaded. `works`: the event loop did not answer,
    while the process's threads ran or waited for a processor.
    """

    reason: str
    missed: bool = False
    works: bool = False


@dataclass(frozen=True, slots=True)
class Exited:
    """The process has exited or could not be started. `jitter` is a random number in [0, 1)."""

    exit: Exit
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; `wake_at` may be reached. `others_serve`: another replica of the instance serves."""

    others_serve: bool = False


Observation = (
    LoadBegan | WorkerReady | WorkerFailed | WorkerDownloading | WorkerDraining | ProbeOk | ProbeFailed | Exited | Tick
)
Event = Command | Observation


class Effect(Enum):
    """An action for the supervisor to execute."""

    LAUNCH = auto()  # start a worker
    TERMINATE = auto()  # let the worker finish its calls within the grace, then end it
    HAND_OVER = auto()  # like TERMINATE, but first serve routers without the successor
    KILL = auto()
    END = auto()  # end the supervisor, which has no process


def explain(exit: Exit, process: str = "worker") -> FailureCause:
    """Explain why a process exited unasked: by its report, else by the exit status and the last line of its
    log."""
    if exit.report is not None:
        return FailureCause.reported(exit.report.message, exit.report.code, exit.report.permanent)
    if exit.status is None:
        how = f"the {process} ended"
    elif exit.status < 0:
        how = f"the {process} was killed by {SIGNALS.get(-exit.status, f'signal {-exit.status}')}"
    else:
        how = f"the {process} exited with status {exit.status}"
    return FailureCause(f"{how}; its log ends: {exit.log_tail}" if exit.log_tail else how)


TRANSITION_TABLE = """
                  STOPPED   STARTING          RUNNING            REPLACING                WAITING           STOPPING   FAILED
Start             STARTING  refused           refused            refused                  refused           REPLACING  STARTING
Adopt             STARTING  refused           refused            refused                  refused           refused    refused
Stop              refused   STOPPING          STOPPING           STOPPING                 STOPPED           STOPPING   STOPPED
Restart           STARTING  REPLACING         REPLACING          REPLACING                STARTING          REPLACING  STARTING
Delete            STOPPED   STOPPING          STOPPING           STOPPING                 STOPPED           STOPPING   STOPPED
Retire            STOPPED   STOPPING          STOPPING           STOPPING                 STOPPED           STOPPING   STOPPED
LoadBegan         -         STARTING          RUNNING            REPLACING                -                 STOPPING   -
WorkerReady       -         STARTING|RUNNING  RUNNING            REPLACING                -                 STOPPING   -
WorkerFailed      -         STARTING          REPLACING          REPLACING                -                 STOPPING   -
WorkerDownloading -         STARTING          RUNNING            REPLACING                -                 STOPPING   -
WorkerDraining    -         REPLACING         REPLACING          REPLACING                -                 STOPPING   -
ProbeOk           -         STARTING|RUNNING  RUNNING            REPLACING                -                 STOPPING   -
ProbeFailed       -         STARTING          RUNNING|REPLACING  REPLACING                -                 STOPPING   -
Exited            -         WAITING|FAILED    WAITING|FAILED     STARTING|WAITING|FAILED  -                 STOPPED    -
Tick              STOPPED   STARTING          RUNNING            REPLACING                WAITING|STARTING  STOPPING   FAILED|STARTING|STOPPED
"""  # noqa: E501

FAILED_EXIT_LIMIT_S = 5.0
"""Time for a worker to exit after it reported a failure."""

WORKING_LIMIT_S = 60.0
"""Time without an answer while the worker's threads work. If they do not, three missed probes end it."""


ALARMING_FAILURES = 5
"""Consecutive failures that raise an alarm."""


FAILURES_FOR_CALLS = 3
"""Consecutive failed starts after which calls that wait for a model on demand are refused."""


class Phase(Enum):
    """The phase of a replica; finer than the state in REST."""

    STOPPED = auto()  # no process, and none should run
    STARTING = auto()  # a process that is not ready yet
    RUNNING = auto()  # a process that serves
    REPLACING = auto()  # a process that is ending; another one follows
    WAITING = auto()  # no process; the next one starts at `wake_at`
    STOPPING = auto()  # a process that is ending; none follows
    FAILED = auto()  # no process: a restart would fail in the same way, at least until `wake_at`

    @property
    def state(self) -> State:
        """The state that users see: STARTING as long as a process that will serve is expected."""
        return _STATES[self]


_STATES = {
    Phase.STOPPED: State.STOPPED,
    Phase.STARTING: State.STARTING,
    Phase.RUNNING: State.RUNNING,
    Phase.REPLACING: State.STARTING,
    Phase.WAITING: State.STARTING,
    Phase.STOPPING: State.STOPPING,
    Phase.FAILED: State.FAILED,
}


class WorkerHealth(Enum):
    """The result of the last probes of a running worker."""

    GOOD = auto()
    DOUBTFUL = auto()  # one probe was missed, or several while its threads work
    BAD = auto()  # several probes in a row were missed, or the self-test failed


def is_routable(health: WorkerHealth, all_health: Iterable[WorkerHealth]) -> bool:
    """True if a worker gets calls; `all_health` is that of all running workers of its instance, itself included.

    A worker leaves the routes at its first missed probe if healthy ones remain. Otherwise it stays: one late answer on
    a loaded machine is more likely than a hanging worker, and without routes every call fails.
    """
    return health is WorkerHealth.GOOD or (health is WorkerHealth.DOUBTFUL and WorkerHealth.GOOD not in all_health)


class CommandRefused(Exception):
    """The command is not allowed in this phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential backoff of restarts, reset by a process that serves for `stable_after_s`.

    Workers have `restart_backoff_secs` and `restart_backoff_max_secs` of the settings in place of these defaults.
    """

    first_s: float = 0.2
    max_s: float = 30.0
    stable_after_s: float = 30.0

    def delay_s(self, failures: int, jitter: float = 0.0) -> float:
        """Return the pause after `failures` (>= 1) consecutive failures, shortened by up to a half for a jitter in
        [0, 1)."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 40)) * (1 - jitter / 2)


LATER = Backoff(first_s=30.0, max_s=600.0)
"""Pauses after failures that may pass: each attempt takes a device's memory, or minutes of its load slot. A model on
demand refuses calls for the first of these pauses. After it a call starts the model, and time does only if another
replica serves.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Rules for restarts. With `max_probe_failures` 0 failed probes never lead to a restart.

    `process` is its name in reasons. `failed_exit_limit_s` is the time to exit after a failed start. `for_calls`: the
    model is loaded on demand, by calls.
    """

    process: str = "worker"
    for_calls: bool = False
    startup_timeout_s: float = 300.0
    failed_exit_limit_s: float = FAILED_EXIT_LIMIT_S
    max_probe_failures: int = 3
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """One replica's state. Times are on the clock that is passed to `step`.

    `wake_at` is when a Tick is due. `failure` is why the current worker is being ended. `reason`, shown to users, is
    why no worker runs or why it was restarted. `streak` counts failures without a stable run in between,
    `failing_since` is the time of the first, `last_failure` and `last_code` are the cause and code of the last.
    `again_at` is when a failed replica of a model on demand is started beside one that serves.
    """

    policy: RestartPolicy
    phase: Phase = Phase.STOPPED
    deleted: bool = False
    failure: FailureCause | None = None
    reason: str | None = None
    restarts: int = 0
    streak: int = 0
    failing_since: float | None = None
    last_failure: str = ""
    last_code: int | None = None
    probe_failures: int = 0
    working_since: float | None = None
    health: WorkerHealth = WorkerHealth.GOOD
    ready_at: float | None = None
    wake_at: float | None = None
    again_at: float = 0.0

    @classmethod
    def failed(cls, policy: RestartPolicy, reason: str) -> ReplicaState:
        """Make the state of a replica that cannot be started as it is; a user may start it once the cause is
        removed."""
        return cls(policy=policy, phase=Phase.FAILED, reason=reason)

    @property
    def is_ending(self) -> bool:
        return self.phase in (Phase.STOPPING, Phase.REPLACING)

    @property
    def is_wanted(self) -> bool:
        return self.phase not in (Phase.STOPPED, Phase.STOPPING)

    @property
    def attempt(self) -> int | None:
        """The number of the present or next start; None if no start failed before it."""
        is_tried = self.phase is not Phase.FAILED or self._is_due
        starts = self.phase in (Phase.STARTING, Phase.WAITING, Phase.FAILED) and is_tried
        return self.streak + 1 if starts and self.streak else None

    def next_attempt_s(self, now: float) -> float | None:
        """Seconds until the next start; None while a process runs, or if no start is due."""
        waits = self.phase is Phase.WAITING or (self.phase is Phase.FAILED and self._is_due)
        return max(0.0, self.wake_at - now) if waits and self.wake_at is not None else None

    @property
    def _is_due(self) -> bool:
        """Whether time alone starts a failed replica."""
        return self.wake_at is not None and not self.policy.for_calls

    def is_failing(self, now: float) -> bool:
        """True if it keeps restarting: `ALARMING_FAILURES` in a row, or failures for a whole start timeout.

        This excludes the state FAILED, which is an alarm of another kind.
        """
        if not self.streak or self.phase not in (Phase.STARTING, Phase.RUNNING, Phase.REPLACING, Phase.WAITING):
            return False
        if self.phase is Phase.RUNNING:
            is_stable = self.ready_at is not None and now - self.ready_at >= self.policy.backoff.stable_after_s
            return self.streak >= ALARMING_FAILURES and not is_stable
        since = now if self.failing_since is None else self.failing_since
        return self.streak >= ALARMING_FAILURES or now - since >= self.policy.startup_timeout_s

    def step(self, event: Event, now: float) -> tuple[ReplicaState, list[Effect]]:
        """Return the state after `event`, and the effects to carry out.

        Raises:
            CommandRefused: the command is not allowed in this phase.
        """
        allowed = TRANSITIONS[_row_name(event)][self.phase]
        refused = not allowed or (self.deleted and event not in (Command.DELETE, Command.RETIRE))
        if isinstance(event, Command) and refused:
            raise CommandRefused
        state, effects = self._apply(event, now) if allowed else (self, [])
        assert not allowed or state.phase in allowed, (self.phase, event, state.phase)
        return state, effects

    def _apply(self, event: Event, now: float) -> tuple[ReplicaState, list[Effect]]:
        match event:
            case Command.START:
                return self._start(now)
            case Command.ADOPT:
                return self._loading(now), []
            case Command.STOP:
                return self._stop()
            case Command.RESTART:
                return self._restart(now)
            case Command.DELETE:
                return replace(self, deleted=True)._stop()
            case Command.RETIRE:
                return replace(self, deleted=True)._retire()
            case LoadBegan() | WorkerDownloading():
                return self._loads(now), []
            case WorkerReady():
                return self._ready(now), []
            case WorkerFailed(failure):
                return self._worker_failed(failure, now)
            case WorkerDraining():
                return self._draining()
            case ProbeOk():
                return self._ready(now)._without_probe_failures(), []
            case ProbeFailed(reason, missed, works):
                return self._probe_failed(reason, missed, works, now)
            case Exited(exit, jitter):
                return self._exited(exit, jitter, now)
            case Tick(others_serve):
                return self._tick(now, others_serve)
            case _:
                assert_never(event)

    def _loading(self, now: float) -> ReplicaState:
        deadline = now + self.policy.startup_timeout_s
        loading = replace(self, phase=Phase.STARTING, failure=None, ready_at=None, wake_at=deadline)
        return loading._without_probe_failures()

    def _launch(self, now: float, *, again: bool) -> tuple[ReplicaState, list[Effect]]:
        queued = replace(self._loading(now), wake_at=None)  # no time limit for the wait for a load slot
        return replace(queued, restarts=self.restarts + again), [Effect.LAUNCH]

    def _start(self, now: float) -> tuple[ReplicaState, list[Effect]]:
        if self.is_ending:
            return replace(self, phase=Phase.REPLACING, failure=None), []
        return replace(self, streak=0, failing_since=None, reason=None)._launch(now, again=False)

    def _stop(self) -> tuple[ReplicaState, list[Effect]]:
        cleared = replace(self, reason=None, wake_at=None)
        if self.is_ending:
            return replace(cleared, phase=Phase.STOPPING), []
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            return replace(cleared, phase=Phase.STOPPING), [Effect.TERMINATE]
        return replace(cleared, phase=Phase.STOPPED), [Effect.END] if self.deleted else []

    def _retire(self) -> tuple[ReplicaState, list[Effect]]:
        state, effects = self._stop()
        return state, [Effect.HAND_OVER] if self.phase is Phase.RUNNING else effects

    def _restart(self, now: float) -> tuple[ReplicaState, list[Effect]]:
        fresh = replace(self, streak=0, failing_since=None, reason=None, failure=None)
        if self.is_ending:
            return replace(fresh, phase=Phase.REPLACING), []
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            return replace(fresh, phase=Phase.REPLACING, wake_at=None), [Effect.TERMINATE]
        return fresh._launch(now, again=True)

    def _ready(self, now: float) -> ReplicaState:
        if self.phase is not Phase.STARTING or self.failure is not None:
            return self
        return replace(self, phase=Phase.RUNNING, ready_at=now, wake_at=None, reason=None)

    def _worker_failed(self, failure: FailureCause, now: float) -> tuple[ReplicaState, list[Effect]]:
        if self.is_ending:
            return self, []
        state = replace(self, failure=failure, reason=failure.message)
        if self.phase is Phase.RUNNING:
            return replace(state, phase=Phase.REPLACING), [Effect.KILL]
        return replace(state, wake_at=now + self.policy.failed_exit_limit_s), []

    def _draining(self) -> tuple[ReplicaState, list[Effect]]:
        if self.is_ending:
            return self, []
        failure = FailureCause(f"the {self.policy.process} was asked to end by another process")
        state = replace(self, phase=Phase.REPLACING, failure=failure, reason=failure.message, wake_at=None)
        return state, [Effect.TERMINATE]

    def _loads(self, now: float) -> ReplicaState:
        if self.phase is not Phase.STARTING or self.failure is not None:
            return self
        return replace(self, wake_at=now + self.policy.startup_timeout_s)

    def _without_probe_failures(self) -> ReplicaState:
        return replace(self, probe_failures=0, working_since=None, health=WorkerHealth.GOOD)

    def _probe_failed(self, reason: str, missed: bool, works: bool, now: float) -> tuple[ReplicaState, list[Effect]]:
        if self.phase is not Phase.RUNNING:
            return self, []
        if works and self.policy.max_probe_failures:
            since = now if self.working_since is None else self.working_since
            if now - since < WORKING_LIMIT_S:  # a heavy call or a loaded machine
                health = WorkerHealth.DOUBTFUL if self.health is WorkerHealth.GOOD else self.health
                return replace(self, working_since=since, health=health), []
            failure = FailureCause(f"busy without an answer for {WORKING_LIMIT_S:g} s: {reason}")
            return replace(self, phase=Phase.REPLACING, failure=failure, reason=failure.message), [Effect.KILL]
        health = WorkerHealth.DOUBTFUL if missed and not self.probe_failures else WorkerHealth.BAD
        state = replace(self, probe_failures=self.probe_failures + 1, health=health)
        if not 0 < self.policy.max_probe_failures <= state.probe_failures:
            return state, []
        failure = FailureCause(f"{state.probe_failures} health probes in a row failed: {reason}")
        # Without grace: a worker that does not answer probes will not finish its calls.
        return replace(state, phase=Phase.REPLACING, failure=failure, reason=failure.message), [Effect.KILL]

    def _exited(self, exit: Exit, jitter: float, now: float) -> tuple[ReplicaState, list[Effect]]:
        if self.phase is Phase.STOPPING:
            return replace(self, phase=Phase.STOPPED), [Effect.END] if self.deleted else []
        if self.phase is Phase.REPLACING and self.failure is None:
            return self._launch(now, again=True)
        failure = self.failure or explain(exit, self.policy.process)
        since = now if self.failing_since is None else self.failing_since
        ended = replace(self, failure=None, reason=failure.message, last_failure=failure.message, wake_at=None)
        ended = replace(ended, failing_since=since, last_code=failure.code)._without_probe_failures()
        if failure.permanent and not failure.may_pass:
            return replace(ended, phase=Phase.FAILED), []
        gives_up = self.policy.for_calls and (
            self.streak + 1 >= FAILURES_FOR_CALLS or now - since >= self.policy.startup_timeout_s
        )
        if (failure.may_pass or gives_up) and not self._was_stable(now):
            streak = self.streak + 1
            failures = max(1, streak + 1 - FAILURES_FOR_CALLS) if self.policy.for_calls else streak
            again_at = now + LATER.delay_s(failures, jitter)
            wake_at = now + LATER.delay_s(1, jitter) if self.policy.for_calls else again_at
            ended = replace(ended, wake_at=wake_at, again_at=again_at)
            return replace(ended, phase=Phase.FAILED, streak=streak, ready_at=None), []
        return ended._wait(jitter, now), []

    def _was_stable(self, now: float) -> bool:
        """True if it has served so long that its end is unrelated to earlier failures."""
        return self.ready_at is not None and now - self.ready_at >= self.policy.backoff.stable_after_s

    def _wait(self, jitter: float, now: float) -> ReplicaState:
        was_stable = self._was_stable(now)
        streak = 0 if was_stable else self.streak + 1
        since = now if was_stable else self.failing_since
        delay_s = 0.0 if was_stable else self.policy.backoff.delay_s(streak, jitter)
        return replace(
            self, phase=Phase.WAITING, streak=streak, failing_since=since, ready_at=None, wake_at=now + delay_s
        )

    def _tick(self, now: float, others_serve: bool) -> tuple[ReplicaState, list[Effect]]:
        if self.wake_at is None or now < self.wake_at:
            return self, []
        if self.phase is Phase.FAILED and self.policy.for_calls and not others_serve:
            return replace(self, phase=Phase.STOPPED, wake_at=None), []
        if self.phase is Phase.FAILED and now < self.again_at:  # the others may end before that
            return replace(self, wake_at=min(self.again_at, now + LATER.first_s)), []
        if self.phase in (Phase.WAITING, Phase.FAILED):
            return self._launch(now, again=True)
        failure = self.failure or FailureCause(f"not ready within {self.policy.startup_timeout_s:g} s", may_pass=True)
        return replace(self, failure=failure, reason=failure.message, wake_at=None), [Effect.KILL]


def _row_name(event: Event) -> str:
    return event.value if isinstance(event, Command) else type(event).__name__


def _parse_table() -> dict[str, dict[Phase, frozenset[Phase]]]:
    """Return row name → phase before → phases after; the empty set for `refused` and `-`."""
    header, *rows = (line.split() for line in TRANSITION_TABLE.strip().splitlines())
    columns = [Phase[name] for name in header]
    table = {name: dict(zip(columns, map(_read_cell, cells), strict=True)) for name, *cells in rows}
    assert table.keys() == {each.value for each in Command} | {kind.__name__ for kind in Observation.__args__}
    return table


def _read_cell(cell: str) -> frozenset[Phase]:
    return frozenset() if cell in ("refused", "-") else frozenset(Phase[name] for name in cell.split("|"))


TRANSITIONS = _parse_table()
