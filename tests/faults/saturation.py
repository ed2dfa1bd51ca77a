"""Saturation: `python -m tests.faults.saturation --minutes 30 [--report FOLDER]`.

Callers without a pause on every surface of three instances of tiny models, every vector compared with the reference;
the memory of each process, and the latency of the first and of the last minute. The exit status is 0 when no vector is
wrong, no call fails, no process is replaced, and none grows by 2 % after the first fifth of the run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as pytest's `pythonpath` has it

from tests.faults import long_run
from tests.faults.callers import Ask, surfaces_of
from tests.faults.results import markdown, write
from tests.faults.world import World
from tests.support.measures import resident_mib

CALLERS = 2  # of each surface and instance
MAX_GROWTH = 0.02
# Growth is counted from the first sample after this share of the run, in medians over windows of this share.
WARM_UP, WINDOW = 0.2, 0.1
_SAMPLE_S = 5.0


@dataclass
class Run:
    """What was measured. `latencies` are (end of the call since the start, seconds) by surface."""

    minutes: float
    texts: int = 0
    latencies: defaultdict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    memory: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    elapsed_s: float = 0.0

    def growth(self) -> dict[str, tuple[float, float]]:
        """MiB of each process after the warm-up and at the end."""
        begin, end = WARM_UP * self.elapsed_s, (1 - WINDOW) * self.elapsed_s
        early = [found for at, found in self.memory if begin <= at <= begin + WINDOW * self.elapsed_s]
        late = [found for at, found in self.memory if at >= end]
        return {
            name: (
                statistics.median(found[name] for found in early if name in found),
                statistics.median(found[name] for found in late if name in found),
            )
            for name in (early[0].keys() & late[-1].keys() if early and late else ())
        }

    def check(self) -> None:
        for name, (before, after) in self.growth().items():
            if after > before * (1 + MAX_GROWTH):
                self.breaches.append(f"{name} grew from {before:.1f} to {after:.1f} MiB")


async def run(folder: Path, minutes: float, seed: int = 1) -> Run:
    """Make the fleet, call for so long, end the fleet."""
    found = Run(minutes)
    world = await asyncio.to_thread(World.make, folder, seed)
    try:
        await world.populate(minilm=False)  # at saturation its callers would be refused as overloaded
        processes = [psutil.Process(world.daemon.process.pid), *world.daemon.processes()]  # type: ignore[union-attr]
        began = time.monotonic()
        async with (
            world.client() as client,
            world.http() as http,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(_sample(processes, began, found))
            for name in world.wanted:
                for surface, (ask, most) in surfaces_of(world, client, http).items():
                    for number in range(CALLERS):
                        chance = random.Random(f"{seed} {name} {surface} {number}")
                        tasks.create_task(_call(world, name, surface, ask, most, chance, began, found))
        found.elapsed_s = time.monotonic() - began
        found.breaches += [f"process {each.pid} ended" for each in processes if not each.is_running()]
        found.breaches += world.breaches[:20]
        found.breaches += await asyncio.to_thread(world.daemon.held_loops)
        found.check()
        if found.breaches:
            print(world.daemon.log(30))
    finally:
        await asyncio.to_thread(world.daemon.close)
    return found


async def _call(
    world: World,
    name: str,
    surface: str,
    ask: Ask,
    most: int,
    chance: random.Random,
    began: float,
    found: Run,
) -> None:
    while (start := time.monotonic()) - began < found.minutes * 60:
        rows = chance.sample(range(len(world.texts)), chance.randint(1, most))
        try:
            vectors = await ask(name, [world.texts[row] for row in rows])
        except Exception as error:  # nothing is broken here on purpose
            if len(found.breaches) < 20:
                found.breaches.append(f"{name}, {surface}: {error!r}")
            await asyncio.sleep(0.1)
            continue
        end = time.monotonic()
        world.check_vectors(name, rows, vectors, world.allowed[name])
        found.texts += len(rows)
        found.latencies[surface].append((end - began, end - start))


async def _sample(processes: Sequence[psutil.Process], began: float, found: Run) -> None:
    while (now := time.monotonic() - began) < found.minutes * 60:
        found.memory.append((now, resident_mib(processes)))
        await asyncio.sleep(min(_SAMPLE_S, found.minutes * 60 / 40))


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000 if ordered else float("nan")


def report(found: Run) -> tuple[list[str], dict[str, Any]]:
    """Lines to read and facts to compute with."""
    minute = min(60.0, found.elapsed_s / 2)
    rows: list[tuple[Any, ...]] = []
    for surface, calls in found.latencies.items():
        first = [s for at, s in calls if at <= minute]
        last = [s for at, s in calls if at >= found.elapsed_s - minute]
        rows.append((surface, len(calls), *(_percentile(part, q) for part in (first, last) for q in (0.5, 0.99))))
    memory = [(name, *pair, 100 * (pair[1] / pair[0] - 1)) for name, pair in sorted(found.growth().items())]
    by_minute = {surface: _p50_by_minute(calls, found.elapsed_s) for surface, calls in found.latencies.items()}
    heads = ("surface", "calls", "first minute: p50, ms", "p99", "last minute: p50, ms", "p99")
    lines = [
        f"{found.texts} texts in {found.elapsed_s:.0f} s on tiny BERT models (width 32, two layers), each vector "
        f"compared with sentence-transformers; {len(found.breaches)} broken invariants.",
        "",
        *markdown(heads, rows),
        "",
        "p50 of every fifth minute, ms: "
        + "; ".join(f"{surface} {', '.join(f'{p50:.3g}' for p50 in p50s[::5])}" for surface, p50s in by_minute.items()),
        "",
        *markdown(("process", "after the warm-up, MiB", "at the end, MiB", "growth, %"), memory),
        "",
        *(f"* {breach}" for breach in found.breaches),
    ]
    facts = {"texts": found.texts, "seconds": round(found.elapsed_s, 1), "breaches": found.breaches}
    return lines, facts | {
        "latency_ms": [dict(zip(heads, row, strict=True)) for row in rows],
        "p50_ms_by_minute": by_minute,
        "memory_mib": {name: pair for name, *pair in memory},
        "memory_mib_by_minute": _memory_by_minute(found),
    }


def _p50_by_minute(calls: Sequence[tuple[float, float]], elapsed_s: float) -> list[float]:
    """p50 in ms of each whole minute of the run: a drift shows in all of them, a slow minute of the machine in one."""
    minutes: list[list[float]] = [[] for _ in range(int(elapsed_s // 60))]
    for at, seconds in calls:
        if at < len(minutes) * 60:
            minutes[int(at // 60)].append(seconds)
    return [round(_percentile(minute, 0.5), 1) for minute in minutes]


def _memory_by_minute(found: Run) -> dict[str, list[float]]:
    """The first sample of each minute of each process."""
    minutes: dict[str, dict[int, float]] = defaultdict(dict)
    for at, mib in found.memory:
        for name, value in mib.items():
            minutes[name].setdefault(int(at // 60), round(value, 1))
    return {name: list(values.values()) for name, values in minutes.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.saturation", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (30)")
    parser.add_argument("--report", type=Path, help="folder for saturation.json and saturation.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ts") as folder:
        found = asyncio.run(run(Path(folder), options.minutes))
    lines, facts = report(found)
    print("\n".join(lines))
    if options.report:
        write(options.report, "saturation", "Saturation", lines, facts)
    return 1 if found.breaches else 0


if __name__ == "__main__":
    sys.exit(long_run.run(main))
