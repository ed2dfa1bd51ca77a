"""The long run: `python -m tests.faults --faults 1000 --seed 1 [--only worker_killed …] [--report FOLDER]`.

The exit status is 0 when no invariant was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as pytest's `pythonpath` has it

from tests.faults import long_run, soak
from tests.faults.catalogue import KINDS


def main() -> int:
    """Run, print the table, write the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="how many (1000)")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of faults and of their moments (1)")
    parser.add_argument("--minutes", type=float, default=75.0, help="end earlier, after so long (75)")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor of all limits, on a machine with other work"
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of faults (all)")
    parser.add_argument("--report", type=Path, help="folder for faults-<seed>.json and faults-<seed>.md")
    options = parser.parse_args()
    if options.report:
        options.report.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tf") as folder:
        how = options.only, options.minutes, options.patience, partial(_tell, options.report)
        report = asyncio.run(soak.run(Path(folder), options.seed, options.faults, *how))
    print(report.table())
    return 1 if report.breaches else 0


def _tell(folder: Path | None, report: soak.Report) -> None:
    """Print how far a run is, and write what it has found so far: it may be stopped, or killed."""
    print(f"{report.faults.total()} faults, {report.duration_s:.0f} s, {len(report.breaches)} broken", flush=True)
    if folder is not None:
        (folder / f"faults-{report.seed}.json").write_text(report.to_json() + "\n")
        (folder / f"faults-{report.seed}.md").write_text(report.table() + "\n")


if __name__ == "__main__":
    sys.exit(long_run.run(main))
