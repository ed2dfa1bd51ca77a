"""The long run: `python -m tests.fuzz --cases 20000 [--only rest|rpc]`.

Each surface gets that many cases; the exit status is 0 when nothing was found.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS.parent))  # as pytest's `pythonpath` has it

from tests.fuzz import rest, rpc, target  # noqa: E402


def main() -> int:
    """Run what is asked for, and say what came of it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--only", choices=("rest", "rpc"))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with target.running() as running, TemporaryDirectory() as folder:
        if options.only != "rpc":
            begun = time.monotonic()
            found = rest.run(running, options.cases, Path(folder))
            if found.failures:
                print(found.output)
            print(f"REST: {found.cases} cases in {time.monotonic() - begun:.0f} s: {found.failures or 'nothing found'}")
            running.check_unharmed()
            if found.failures:
                return 1
        if options.only != "rest":
            begun = time.monotonic()
            report = rpc.run(running, options.cases)
            print(f"gRPC: {report.cases} cases in {time.monotonic() - begun:.0f} s: {dict(report.statuses)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
