"""Stray workers: live processes of a run directory, or children of the nursery, of which the launcher has no handle."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from teimgr.control.launch.process_handle import (
    ProcessHandle,
    ProcessId,
    WorkerPaths,
    WorkerRunFile,
    all_worker_paths,
    boot_id,
    children_of,
    look_up,
    open_pidfd,
)


@dataclass(frozen=True, slots=True)
class Stray:
    """A live worker process that nothing owns. `key` identifies it; `instance` is empty if it is not known.

    `end` kills it; raises LaunchFailed: it is still there some time after SIGKILL.
    """

    key: str
    instance: str
    pid: int
    end: Callable[[], Awaitable[object]]


def without_handle(
    run_dir: Path, incarnations: Collection[str], pids: Collection[int], nursery: Collection[int | None]
) -> list[Stray]:
    """Workers that are not among those known by `incarnations` and `pids`: processes with a run file, and children of
    the `nursery` and its standby without one, such as those whose answer was lost.

    Raises:
        OSError: they cannot be looked for, for lack of descriptors.
    """
    found = []
    for paths in all_worker_paths(run_dir):
        run_file = WorkerRunFile.read(paths.run_file) if paths.incarnation not in incarnations else None
        if run_file and run_file.boot_id == boot_id() and look_up(run_file.pid) == run_file.process:
            end = partial(_kill, run_file.process, paths)
            found.append(Stray(paths.incarnation, run_file.instance, run_file.pid, end))
    known = {*pids, *nursery, *(each.pid for each in found)}
    return found + [
        Stray(f"process {each.pid} of {each.start_time}", "", each.pid, partial(_kill, each, None))
        for each in children_of(*nursery)
        if each.pid not in known
    ]


async def _kill(process: ProcessId, paths: WorkerPaths | None) -> None:
    if (pidfd := open_pidfd(process)) is not None:
        await ProcessHandle(process.pid, pidfd).stop(0)
    if paths is not None:
        paths.remove()
