"""A fault run: faults drawn by a seed, one after the other under load, and what came of them."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.faults.callers import Callers
from tests.faults.catalogue import KINDS, Kind, WorldT
from tests.faults.world import World


@dataclass
class Report:
    """Counts of a run.

    `recovery_s` is by kind, from the end of the injection, `took_s` the time for all faults of a kind, with the checks
    after them; `breaches` are broken invariants.
    """

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    recovery_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    took_s: Counter[str] = field(default_factory=Counter)
    breaches: list[str] = field(default_factory=list)
    replies: Counter[str] = field(default_factory=Counter)
    texts: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    duration_s: float = 0.0
    memory_mib: list[dict[str, float]] = field(default_factory=list)

    def take(self, world: World, callers: Callers, duration_s: float) -> None:
        """Count what has come of the calls until now."""
        self.breaches, self.duration_s, self.texts = world.breaches, duration_s, callers.texts
        self.replies, self.failures = Counter(), Counter()
        for (_, surface), count in callers.replies.items():
            self.replies[surface] += count
        for (_, surface, outcome), count in callers.failures.items():
            self.failures[f"{surface}: {outcome}"] += count

    def to_json(self) -> str:
        return json.dumps(
            {**vars(self), "recovery_s": {kind: _percentiles(s) for kind, s in self.recovery_s.items()}}, indent=1
        )

    def table(self) -> str:
        """Markdown for readers."""
        lines = [
            f"{self.faults.total()} faults, seed {self.seed}, {self.duration_s:.0f} s; {self.replies.total()} right "
            f"replies with {self.texts} vectors compared; {len(self.breaches)} broken invariants.",
            "",
            "| fault | count | healed after, s: p50 | p90 | p99 | max | with injection and checks, mean |",
            "|---|---|---|---|---|---|---|",
        ]
        for kind, count in sorted(self.faults.items()):
            found = [*_percentiles(self.recovery_s[kind]).values(), self.took_s[kind] / count]
            lines.append(f"| {kind.replace('_', ' ')} | {count} | " + " | ".join(f"{s:.2f}" for s in found) + " |")
        lines += ["", "Failed calls by outcome: " + ", ".join(f"{kind} {n}" for kind, n in self.failures.most_common())]
        return "\n".join([*lines, *(f"* {breach}" for breach in self.breaches)])


async def run(
    folder: Path,
    seed: int,
    faults: int,
    kinds: Iterable[str] = KINDS,
    minutes: float = 60.0,
    patience: float = 1.0,
    tell: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Draw `faults` of these kinds, as far as they fit into `minutes`; the daemon ends with the run.

    `patience` is a factor of every limit of time, for a machine with other work. `tell` hears of the report after each
    fault and at the end, however that comes.
    """
    report = Report(seed)
    world = await asyncio.to_thread(World.make, folder, seed, patience=patience)
    callers = Callers(world)
    began = time.monotonic()
    try:
        await world.populate()
        began = time.monotonic()  # a loaded machine may need a minute until here
        names = [kind for kind in kinds for _ in range(KINDS[kind].weight)]
        async with callers.calling(list(world.wanted)):
            for number in range(faults):
                if time.monotonic() - began > minutes * 60.0:
                    break
                kind, first = world.random.choice(names), time.monotonic()
                await inject(world, callers, kind, KINDS[kind], report, number)
                report.took_s[kind] += time.monotonic() - first
                report.take(world, callers, time.monotonic() - began)
                tell(report)
                if world.breaches:
                    break
    finally:
        report.take(world, callers, time.monotonic() - began)
        tell(report)
        # On a machine with other work a loop may also wait for a processor; one that was held has used one.
        world.breaches += await asyncio.to_thread(world.daemon.held_loops, 0.1 if patience > 1 else 0.0)
        report.take(world, callers, report.duration_s)
        if world.breaches:
            print(world.daemon.log(100))
        await asyncio.to_thread(world.daemon.close)
        tell(report)
    return report


async def inject(world: WorldT, callers: Callers, kind: str, fault: Kind[WorldT], report: Report, number: int) -> float:
    """Do one fault, wait for the healing, check the invariants; how long all took until the healing, in seconds.

    What is broken then is among the breaches of the world.
    """
    spared = list(world.wanted) if fault.spares_all else ["neighbour"] if fault.spares_neighbour else []
    before = {name: callers.failures_of(name) for name in spared}
    report.faults[kind] += 1
    where = f"fault {number}, {kind}"
    first = time.monotonic()
    try:
        async with asyncio.timeout(fault.takes_at_most_s * world.patience):
            await fault.inject(world)
        began = time.monotonic()
        await world.converged(fault.heals_within_s * world.patience)
        ended = time.monotonic()
        report.recovery_s[kind].append(ended - began)
    except Exception as error:  # whatever it is, the run is over and the report has it
        traceback.print_exception(error)
        world.breaches.append(f"{where}: {error!r}")
        return time.monotonic() - first
    world.check_state_file()
    await world.check_left_over()
    await callers.all_served(fault.served_within_s * world.patience)
    for name in spared:
        if lost := callers.failures_of(name) - before[name]:
            texts = [text for (other, _), text in callers.last_refusals.items() if other == name]
            world.breaches.append(f"{where}: calls on {name} failed: {dict(lost)}, {texts}")
    report.memory_mib.append(await asyncio.to_thread(_memory, world))
    world.breaches = [breach if breach.startswith("fault") else f"{where}: {breach}" for breach in world.breaches]
    return ended - first


def _memory(world: World) -> dict[str, float]:
    """Resident MiB and descriptors of the daemon and the mux."""
    found: dict[str, float] = {}
    assert world.daemon.process is not None
    for name, process in (
        ("daemon", psutil.Process(world.daemon.process.pid)),
        ("mux", world.process("teimgr.mux.process")),
    ):
        if process is not None:
            found |= {f"{name}_mib": process.memory_info().rss / 2**20, f"{name}_descriptors": process.num_fds()}
    return found


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered: Any = sorted(values) or [0.0]
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in at.items()}
