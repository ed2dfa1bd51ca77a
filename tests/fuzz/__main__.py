"""The long run: `python -m tests.fuzz --cases 100000 [--only http1 toml …] [--report FOLDER]`.

Each surface gets that many cases, or as many as fit into `--minutes`; the exit status is 0 when nothing was found.
`python -m tests.fuzz --victim` is another run, with a second client beside attacks (`victim/command.py`).
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS.parent))  # as pytest's `pythonpath` has it

from tests.faults import long_run  # noqa: E402
from tests.faults.results import markdown, write  # noqa: E402
from tests.fuzz import (  # noqa: E402
    documents,
    flooding,
    h2c,
    http1,
    http2,
    images,
    link_frames,
    native,
    rest,
    sounds,
    target,
    toml_files,
)
from tests.fuzz.surface import Report  # noqa: E402
from tests.fuzz.victim.command import main as victim  # noqa: E402
from tests.support.measures import resident_mib  # noqa: E402

SURFACES: dict[str, Callable[[target.Target, int, Report], None]] = {
    "toml": lambda running, cases, report: toml_files.run(cases, report),
    "images": lambda running, cases, report: images.run(cases, report),
    "audio": lambda running, cases, report: images.run(cases, report, sounds.__name__),
    "pdf": lambda running, cases, report: images.run(cases, report, documents.__name__),
    "frames": link_frames.run,
    "http1": http1.run,
    "http2": http2.run,
    "h2c": h2c.run,
    "rpc": flooding.run,
    "native": lambda running, cases, report: _native(cases, report),
    "rest": lambda running, cases, report: _rest(running, cases, report),
}
VICTIM = "--victim"
# A surface runs in this many parts: the first warms everything up, and time is looked at after each.
PARTS = 10
# Beyond this a process is said to have grown: allocators round up, and caches of a fixed size fill.
GROWTH_SHARE, GROWTH_MIB = 0.1, 24.0


def main() -> int:
    """Run the surfaces one after the other, print the table, write the report."""
    if VICTIM in sys.argv:
        return victim([each for each in sys.argv[1:] if each != VICTIM])
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000, help="of each surface (20000)")
    parser.add_argument("--minutes", type=float, default=60.0, help="for each surface, at most (60)")
    parser.add_argument("--only", nargs="+", choices=SURFACES, default=list(SURFACES), help="surfaces (all)")
    parser.add_argument("--report", type=Path, help="folder for fuzz.json and fuzz.md")
    parser.add_argument(VICTIM, action="store_true", help="the run with a second client; its options: --victim --help")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    reports = []
    with target.running() as running:
        running.fill_caches()
        for name in options.only:
            reports.append(_run(running, name, options.cases, options.minutes))
            print(f"{name}: {reports[-1].cases} cases in {reports[-1].seconds:.0f} s: {dict(reports[-1].outcomes)}")
            for failure in reports[-1].failures:
                print(f"  {failure[:400]}")
    lines = _table(reports)
    print("\n".join(lines))
    if options.report:
        write(options.report, "fuzz", "Malformed input", lines, {"surfaces": [vars(report) for report in reports]})
    return 1 if any(report.failures for report in reports) else 0


def _run(running: target.Target, name: str, cases: int, minutes: float) -> Report:
    report, began = Report(name), time.monotonic()
    before: dict[str, float] = {}
    for part in range(PARTS):
        SURFACES[name](running, cases * (part + 1) // PARTS - cases * part // PARTS, report)
        try:
            running.check_unharmed()
        except AssertionError as error:
            report.fail(f"after {report.cases} cases: {error or 'another vector'}")
            break
        report.memory_by_part.append(_memory(running))
        if part == 0:
            before = report.memory_by_part[0]
        if time.monotonic() - began > minutes * 60:
            break
    report.seconds = round(time.monotonic() - began, 1)
    after = _memory(running)
    report.memory_mib = {each: (mib, after[each]) for each, mib in before.items() if each in after}
    for each, (mib, then) in report.memory_mib.items():
        if then - mib > max(GROWTH_MIB, GROWTH_SHARE * mib):
            report.fail(f"{each} grew from {mib:.0f} to {then:.0f} MiB")
    return report


def _rest(running: target.Target, cases: int, report: Report) -> None:
    """By the OpenAPI documents; the boundaries of each operation once."""
    with TemporaryDirectory() as folder:
        found = rest.run(running, cases, Path(folder), boundaries=report.cases == 0, first_seed=report.cases)
    report.cases += found.cases
    report.outcomes["conforms"] += found.cases
    for failure in found.failures:
        report.fail(f"{failure}\n{found.output[-3000:]}")


def _native(cases: int, report: Report) -> None:
    """The C library with sanitizers, in a process of its own; other cases in each part."""
    if native.compiler_runtime() is None:
        report.fail("there is no compiler with sanitizers")
        return
    seed = report.cases
    report.cases += cases
    try:
        done = native.run_cases(cases, seed)
    except subprocess.TimeoutExpired:
        report.outcomes["endless"] += cases
        report.fail(f"{cases} cases from seed {seed} did not end in {native.LIMIT_S} s")
        return
    report.outcomes["clean" if done.returncode == 0 else "harmed"] += cases
    if done.returncode:
        report.fail(done.stderr[-3000:])


def _memory(running: target.Target) -> dict[str, float]:
    daemon = running.daemon
    assert daemon.process is not None
    return resident_mib([psutil.Process(daemon.process.pid), *daemon.processes()])


def _table(reports: list[Report]) -> list[str]:
    rows = [
        (
            report.surface,
            report.cases,
            report.seconds,
            len(report.failures),
            max((round(then - mib, 1) for mib, then in report.memory_mib.values()), default=0.0),
            ", ".join(f"{outcome} {count}" for outcome, count in report.outcomes.most_common(8)),
        )
        for report in reports
    ]
    header = ("surface", "cases", "seconds", "broken invariants", "most growth of a process, MiB", "outcomes")
    return [
        *markdown(header, rows),
        *(f"* {report.surface}: {each[:300]}" for report in reports for each in report.failures),
    ]


if __name__ == "__main__":
    sys.exit(long_run.run(main))
