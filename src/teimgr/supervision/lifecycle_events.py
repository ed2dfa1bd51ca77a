"""The words between a supervisor and the state machine: what happens, and what is to be done about it."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from teimgr.launch.launcher import Exit

_SIGNALS = {number.value: number.name for number in signal.Signals}

# Commands: what users and the manager want.


@dataclass(frozen=True, slots=True)
class Start:
    """Have a worker."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """There is a worker already, left by an earlier daemon."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Have no worker."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Have a new worker."""


@dataclass(frozen=True, slots=True)
class Delete:
    """Have no worker, ever."""


@dataclass(frozen=True, slots=True)
class Retire:
    """Have no worker, ever: others serve in its place."""


# News: what the worker and the clock say.


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Why a worker is of no use. A `permanent` one would come again with every new worker."""

    message: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker ran a known text through its device."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker gave up, and will exit."""

    failure: FailureCause


@dataclass(frozen=True, slots=True)
class WorkerDownloading:
    """The worker is fetching its model's files and gets on with it: that time is not the start's."""


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """The worker takes no more work, and will exit."""


@dataclass(frozen=True, slots=True)
class ProbeOk:
    """The worker proved again that its device works."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """It did not."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone, or could not be made. `jitter` is a fresh random number in [0, 1)."""

    exit: Exit
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; perhaps `wake_at` is over."""


Command = Start | Adopt | Stop | Restart | Delete | Retire
News = WorkerReady | WorkerFailed | WorkerDownloading | WorkerDraining | ProbeOk | ProbeFailed | Exited | Tick
Event = Command | News

# Effects: what the supervisor is to do.


@dataclass(frozen=True, slots=True)
class Launch:
    """Make a worker."""


@dataclass(frozen=True, slots=True)
class Terminate:
    """Let the worker finish what it has, within the grace, then end it."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """As `Terminate`, after the worker has served those who have not heard yet that others do now."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End the worker now."""


@dataclass(frozen=True, slots=True)
class Gone:
    """There is no process any more and none will come: forget it."""


Effect = Launch | Terminate | HandOver | Kill | Gone


def explain(exit: Exit) -> FailureCause:
    """Why a worker that nobody ended has ended: its own words, else what the kernel and its log say."""
    if exit.report is not None:
        return FailureCause(exit.report.message, exit.report.permanent)
    if exit.status is None:
        how = "the worker ended"
    elif exit.status < 0:
        how = f"the worker was killed by {_SIGNALS.get(-exit.status, f'signal {-exit.status}')}"
    else:
        how = f"the worker exited with status {exit.status}"
    return FailureCause(f"{how}; its log ends: {exit.log_tail}" if exit.log_tail else how)
