"""Events and effects of a replica's state machine."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from teimgr.launch.launcher import Exit

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
News = WorkerReady | WorkerFailed | WorkerDownloading | WorkerDraining | ProbeOk | ProbeFailed | Exited | Tick
Event = Command | News

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
