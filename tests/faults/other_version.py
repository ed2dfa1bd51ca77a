"""`teimgr` of another version, as far as it tells: `TEIMGR_TEST_VERSION=9.9 python -m tests.faults.other_version …`.

Its fork server is that of the tests, as in `tests.support.fork_server`.
"""

from __future__ import annotations

import os
import runpy

import teimgr

VERSION = "TEIMGR_TEST_VERSION"

if __name__ == "__main__":
    teimgr.__version__ = os.environ[VERSION]  # before anything imports it
    runpy.run_module("tests.support.fork_server", run_name="__main__", alter_sys=True)
