"""A module that makes the nursery which preloads it die once, around the writing of a worker's run file.

The environment has the place: MORTAL is `before` or `after`, MORTAL_MARK a file that is there once it has died.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_nursery = sys.modules["__main__"]
_write = _nursery.write_run_file


def _write_and_die(request: dict[str, str], pid: int) -> None:
    mark = Path(os.environ["MORTAL_MARK"])
    if mark.exists():
        return _write(request, pid)
    mark.write_text(str(pid))
    if os.environ["MORTAL"] == "after":
        _write(request, pid)
    os._exit(1)


_nursery.write_run_file = _write_and_die
