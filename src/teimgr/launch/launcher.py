"""Protocols between supervision and worker processes: launch, wait, stop, adopt.

Supervision uses nothing else of a worker's process, so that other launchers (a cluster manager, stand-ins in tests) can
take the place of the local one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from teimgr.launch.control_link import WorkerStatus
from teimgr.spec import WorkerSpec


class LaunchFailed(Exception):
    """A process could not be started, or not be ended; the text is the reason. May succeed later."""


@dataclass(frozen=True, slots=True)
class ExitReport:
    """The reason that a worker gives for its exit. `code` is a number of `errors.Code`.

    `permanent`: another worker with the same spec would fail in the same way.
    """

    code: int
    message: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended.

    `status` is the exit status, negative for a signal, None where it is unknown (an adopted process is not our child).
    `log_tail` is the last line of the worker's log where that may explain the exit.
    """

    status: int | None
    report: ExitReport | None = None
    log_tail: str = ""


class WorkerHandle(Protocol):
    """A worker process that was started with `spec`. `started_at` is seconds since the epoch."""

    spec: WorkerSpec
    incarnation: str
    pid: int
    socket: Path
    started_at: float

    async def wait(self) -> Exit:
        """Return when the process is gone and its files are removed. Any number may wait."""

    async def stop(self, grace_s: float, *, ask: bool = True) -> Exit:
        """End the process and all its children; return when it is gone.

        SIGTERM (unless `ask` is false, because it was asked over its link), `grace_s`, SIGKILL for its group. May be
        called again with less grace to cut the first call short.

        Raises:
            LaunchFailed: it is still there some time after SIGKILL.
        """


@dataclass(frozen=True, slots=True)
class Adopted:
    """A live worker of an earlier daemon, with the status it has just answered."""

    handle: WorkerHandle
    status: WorkerStatus


class Launcher(Protocol):
    """Starts workers, and finds those of an earlier daemon."""

    async def start(self) -> None:
        """Prepare, once; returns before slow preparations end.

        Raises:
            InvalidConfig: the run directory cannot be used, or another daemon uses it.
        """

    async def launch(self, spec: WorkerSpec) -> WorkerHandle:
        """Start a worker; its socket already accepts connections. A cancelled launch leaves no process behind.

        Raises:
            LaunchFailed: it could not be started.
        """

    async def adopt(self, accepts: Callable[[WorkerSpec], bool]) -> list[Adopted]:
        """The live workers of an earlier daemon whose spec `accepts`, at most one per replica of an instance.

        All others are ended, and the files of dead ones removed.
        """

    async def close(self) -> None:
        """Release everything; the workers go on."""
