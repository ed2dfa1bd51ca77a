"""`python -m tests [-n 4] [ARGUMENT OF PYTEST …]`: the suite in several processes, which take groups of files in turns.

Each process is pytest that collects a group when its turn has come (`groups.py`), so that the suite is imported and
collected once in all. Dots and letters of tests appear at once, the rest of what a process says when it has ended.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from tests.groups import NUMBER_BYTES, groups
from tests.support.fork_server import SERVICE, nursery_service

ROOT = Path(__file__).resolve().parents[1]
PROGRESS = set(b".FEsxX")
NOTHING_TO_RUN = 5  # pytest's status where no test was chosen


def main() -> int:
    """Run the suite; the worst exit status of the processes."""
    parser = argparse.ArgumentParser(prog="python -m tests", description=__doc__, allow_abbrev=False)
    parser.add_argument("-n", type=int, default=4, help="processes; 4 keep two cores busy, as a test waits at times")
    parser.add_argument("--under", action="append", type=Path, help="only groups with a file there; may be repeated")
    options, arguments = parser.parse_known_args()
    under = [path.resolve() for path in options.under or [ROOT]]
    begun = time.monotonic()
    ours, theirs = os.pipe()
    for number, files in enumerate(groups()):
        if any(file.is_relative_to(path) for file in files for path in under):
            os.write(theirs, b"%*d" % (NUMBER_BYTES, number))
    os.close(theirs)  # each process takes the next number, until there are none
    nurseries = nursery_service()
    running = [_Process(number, ours, nurseries, arguments) for number in range(options.n)]
    statuses = [process.ended() for process in running]
    for process in running:
        print(f"\n── process {process.number}\n{process.said.decode(errors='replace')}", flush=True)
    left = len(os.read(ours, 1 << 16)) // NUMBER_BYTES
    print(f"{options.n} processes, {time.monotonic() - begun:.0f} s, exit statuses {statuses}, {left} groups not begun")
    ran = [abs(status) for status in statuses if status != NOTHING_TO_RUN] or [NOTHING_TO_RUN]
    return max(*ran, int(left > 0))


class _Process:
    """A pytest and what it has said, but for its dots."""

    def __init__(self, number: int, pipe: int, nurseries: str, arguments: list[str]) -> None:
        self.number = number
        self.said = b""
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "tests.groups",
                f"--groups={pipe}",
                "-o",
                "console_output_style=classic",
                *arguments,
            ],
            cwd=ROOT,
            # Ports of its own (support/daemon_process.py), and one fork server for all.
            env=os.environ | {"TESTS_PROCESS": str(number), SERVICE: nurseries},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[pipe],
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=[self._process.stdout])
        self._reader.start()

    def ended(self) -> int:
        """Wait for it."""
        self._reader.join()
        return self._process.wait()

    def _read(self, output: IO[bytes]) -> None:
        with output:
            while part := os.read(output.fileno(), 1 << 16):
                if not self.said and PROGRESS.issuperset(part):
                    os.write(sys.stdout.fileno(), part)
                else:
                    self.said += part


if __name__ == "__main__":
    sys.exit(main())
