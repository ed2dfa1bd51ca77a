"""The real daemon, whose nursery forks scripted workers: `python -m tests.faults.scripted_serve serve -c FILE`."""

from __future__ import annotations

import sys
from functools import partial

from teimgr.cli.main import main
from teimgr.control.launch.launcher import LocalOptions
from teimgr.daemon import process as daemon

if __name__ == "__main__":
    daemon.LocalOptions = partial(LocalOptions, entry="tests.support.fakes.worker:main", preload=())  # type: ignore
    sys.exit(main())
