"""The seam between wanting a worker and having one: launch, wait, stop.

Supervision knows workers only through these protocols, so that processes of this host, processes placed by a
cluster manager and stand-ins in tests are the same to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from teimgr.launch.control_link import WorkerStatus
from teimgr.spec import WorkerSpec

KILL_LIMIT_S = 10.0
"""How long a process may take to vanish after SIGKILL before we call it stuck."""


class LaunchFailed(Exception):
    """The worker's process could not be made; the text says why. Worth another try later."""


@dataclass(frozen=True, slots=True)
class ExitReport:
    """What a worker said of its own end. `code` is a number of `errors.Code`.

    `permanent` means that starting it again with the same spec ends in the same way.
    """

    code: int
    message: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker's process ended.

    `status` is the exit status, negative for a signal, None where nobody could collect it (an adopted process is
    another's child). `log_tail` is the last line of its log where that may say more than a number does.
    """

    status: int | None
    report: ExitReport | None = None
    log_tail: str = ""


class WorkerHandle(Protocol):
    """One process that was made for `spec`. `started_at` is seconds since the epoch."""

    spec: WorkerSpec
    incarnation: str
    pid: int
    socket: Path
    started_at: float

    async def wait(self) -> Exit:
        """Return when the process is gone and nothing of it is left on disk. Any number may wait."""

    async def stop(self, grace_s: float, *, ask: bool = True) -> Exit:
        """End the process and all it started; return when it is gone.

        The ladder: ask it by signal (not when `ask` is false, because it was asked over its link), wait `grace_s`,
        kill the group, wait `KILL_LIMIT_S`. May be called again, with a shorter grace to hurry.

        Raises:
            LaunchFailed: it is still there after all that.
        """


@dataclass(frozen=True, slots=True)
class Adopted:
    """A worker of an earlier daemon, and what it said of itself just now."""

    handle: WorkerHandle
    status: WorkerStatus


class Launcher(Protocol):
    """Makes workers, and finds those of a daemon that died."""

    async def start(self) -> None:
        """Get ready, once; returns before slow preparations end.

        Raises:
            InvalidConfig: the run directory cannot be used, or another daemon uses it.
        """

    async def launch(self, spec: WorkerSpec) -> WorkerHandle:
        """A new process for `spec`, its socket already accepting connections. Cancelled, it leaves none behind.

        Raises:
            LaunchFailed: there is none.
        """

    async def adopt(self, accepts: Callable[[WorkerSpec], bool]) -> list[Adopted]:
        """The live workers of an earlier daemon whose spec `accepts`, at most one per replica of an instance.

        All others are ended, and what dead ones left is removed.
        """

    async def close(self) -> None:
        """Give up everything but the workers, which go on."""
