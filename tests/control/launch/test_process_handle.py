"""Process identity: a pid is of one process, not of its zombie or of the next with its number."""

from __future__ import annotations

import os
import subprocess
import sys

from teimgr.control.launch.process_handle import (
    ProcessId,
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
