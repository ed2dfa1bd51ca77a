"""Kills a process at each system call of one `Store.save`, before and after the call, with ptrace(2).

`python -m tests.control.supervision.kill_points FOLDER` prints, for each point, what the next process loads: the names
of the instances, and the alarm. A process of its own, because a fork of one with threads may hang.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from teimgr.control.supervision.store import Store
from teimgr.spec import InstanceSpec

_TRACEME, _SYSCALL, _SETOPTIONS, _EXITKILL = 0, 24, 0x4200, 0x100000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, data: int = 0) -> None:
    if _libc.ptrace(request, pid, None, data) != 0:
        raise OSError(ctypes.get_errno(), f"ptrace request {request}")


def _instances(*names: str) -> list[InstanceSpec]:
    return [InstanceSpec(name=name, model_id="m", port=1024 + at) for at, name in enumerate(names)]


def killed_at(file: Path, point: int) -> bool:
    """Save in a child that is killed at its `point`-th stop; False where it ended before."""
    pid = os.fork()
    if pid == 0:
        _ptrace(_TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        Store(file).save(_instances("new", "newer"))
        os._exit(0)
    os.waitpid(pid, 0)
    _ptrace(_SETOPTIONS, pid, _EXITKILL)
    for _ in range(point):
        _ptrace(_SYSCALL, pid)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            return False
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return True


def main(folder: Path) -> None:
    """Kill at one point after the other, from the same state each time."""
    outcomes, point, is_killed = [], 0, True
    while is_killed:
        for file in folder.iterdir():
            file.unlink()
        Store(folder / "state.toml").save(_instances("older"))
        Store(folder / "state.toml").save(_instances("old"))
        is_killed = killed_at(folder / "state.toml", point)
        loaded = Store(folder / "state.toml").load()
        outcomes.append({"names": [spec.name for spec in loaded.specs], "alarm": loaded.alarm})
        point += 1
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
