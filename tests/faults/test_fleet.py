"""The measurement of large fleets, in small: its end by a signal, which all long runs share."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.faults.long_run import INTERRUPTED
from tests.support.polling import until

_LIMIT_S = 40.0


@pytest.mark.slow
def test_sigterm_ends_the_run_and_its_daemon() -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.fleet", "--instances", "1"], stdout=subprocess.PIPE, text=True
    )
    within = psutil.Process(run.pid)

    def started() -> list[psutil.Process]:
        """The daemon, the mux and the nursery; any of them may be young."""
        found = within.children(recursive=True)
        return found if len(found) >= 3 else []

    processes = until(started, "a daemon", _LIMIT_S)
    run.terminate()

    output, _ = run.communicate(timeout=_LIMIT_S)
    assert (run.returncode, output.splitlines()[-1:]) == (INTERRUPTED, ["interrupted"])
    assert psutil.wait_procs(processes, timeout=_LIMIT_S)[1] == []
