"""Process identity: a pid is of one process, not of its zombie or of the next with its number."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from teimgr.control.launch import process_handle
from teimgr.control.launch.process_handle import (
    ProcessId,
    WorkMeter,
    look_up,
    open_pidfd,
)


def test_a_zombie_is_no_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    before = look_up(child.pid)
    assert child.stdout is not None
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert look_up(child.pid) is None
    assert before is None or open_pidfd(before) is None
    child.stdout.close()
    child.wait()


def test_a_number_given_away_again_is_another_process() -> None:
    me = look_up(os.getpid())
    assert me is not None

    assert open_pidfd(ProcessId(me.pid, me.start_time + 1)) is None
    pidfd = open_pidfd(me)
    assert pidfd is not None
    os.close(pidfd)


# Whether a process has worked.


class Metered:
    """Its threads have run for `share` of the time that has passed; it is read within a turn of the loop."""

    def __init__(self, share: float | None) -> None:
        self.share = share

    async def activity_s(self) -> float | None:
        at = asyncio.get_running_loop().time()
        await asyncio.sleep(0)
        return None if self.share is None else self.share * at


@pytest.mark.parametrize(("share", "worked"), [(4.0, True), (0.3, True), (0.0, False), (None, False)])
async def test_a_process_has_worked_that_ran_for_a_part_of_the_time(share: float | None, worked: bool) -> None:
    async with WorkMeter(Metered(share)) as meter:
        assert await meter.has_worked() is worked


async def test_each_call_looks_at_the_time_since_the_last_one() -> None:
    process = Metered(1.0)
    async with WorkMeter(process) as meter:
        assert await meter.has_worked()
        process.share = 0.0  # it would have gone backwards: no work since
        assert not await meter.has_worked()
        assert not await meter.has_worked()
        process.share = 1.0
        assert await meter.has_worked()


async def test_nothing_waits_for_a_reading_that_nobody_asks_for() -> None:
    class Silent:
        async def activity_s(self) -> float | None:
            await asyncio.Event().wait()
            return None

    async with asyncio.timeout(5), WorkMeter(Silent()):
        pass


def test_a_run_file_is_written_on_a_full_disk_in_the_room_of_the_lock_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / process_handle.LOCK_FILE
    lock.touch()
    process_handle.keep_room(tmp_path)

    def write(path: Path, content: bytes) -> None:
        if lock.stat().st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(content)

    monkeypatch.setattr(process_handle, "write_atomically", write)
    run_file = process_handle.RunFile.of(os.getpid())
    assert run_file is not None
    run_file.write(tmp_path / "a.run")
    assert process_handle.RunFile.read(tmp_path / "a.run") == run_file
    assert lock.stat().st_size == 0
