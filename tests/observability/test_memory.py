"""The limit of open files."""

from __future__ import annotations

import resource
import subprocess
import sys

CODE = """
import resource
from teimgr.observability.memory import max_connections, raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
raise_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), max_connections())
"""


def test_the_limit_of_open_files_is_raised_to_what_is_allowed() -> None:
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4000)
    done = subprocess.run([sys.executable, "-c", CODE.format(hard=hard)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(hard), str(hard), str(hard // 2)]
