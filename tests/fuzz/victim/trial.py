"""One attack beside the second client's calls: its verdict, its repetition, and the smallest size that still harms."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from bench.contest import Child
from bench.steady import OK

from tests.fuzz.victim.attack import Attack
from tests.fuzz.victim.target import Target

# On two cores that others use too a process may wait its turn for so long: only what is slower than this, and than
# twice the idle p99 of the same minutes, is slow.
FLOOR_MS = 250.0
# p99 of some sixty calls is in the bound where at most one is slow.
MAX_SLOW = 1
# Beyond this a process is said to have kept memory: allocators round up, and caches of a fixed size fill.
GROWTH_SHARE, GROWTH_MIB = 0.1, 48.0
BACK_WITHIN_S = 20.0
_MIN_WINDOW_S = 1.0
_QUIET_S = 0.5
_IDLE_SAMPLES = 400
_TRIES = 3
_POLL_S = 0.1


@dataclass(frozen=True)
class Verdict:
    """What one attack did: to itself in words, to the second client, and what is `broken` of the invariants."""

    outcome: str
    seconds: float
    calls: int
    worst_ms: float
    broken: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A broken invariant with what makes it happen again."""

    title: str
    seed: int
    size: int
    unit: str
    broken: tuple[str, ...]
    outcome: str

    @property
    def reproducer(self) -> str:
        return f"--attack '{self.title}' --seed {self.seed} --size {self.size}"


@dataclass
class Course:
    """All attempts of a run."""

    cases: int = 0
    worst_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of the second client, by surface."""
    by_surface: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    findings: list[Finding] = field(default_factory=list)


class Trial:
    """Runs attacks against a target while `second` (a child of `bench.steady`) calls."""

    def __init__(self, target: Target, second: Child, floor_ms: float = FLOOR_MS) -> None:
        self.target = target
        self.course = Course()
        self._second = second
        self._floor_ms = floor_ms
        self._idle: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_IDLE_SAMPLES))
        self._lives = target.lives()
        self._missed = target.missed()
        self._memory = target.memory()

    async def quiet(self, seconds: float = _QUIET_S) -> None:
        """Leave the second client alone, which shows what is usual."""
        began = time.monotonic()
        await asyncio.sleep(seconds)
        for name, latency_ms, _ in await self._calls(began, time.monotonic()):
            self._idle[name].append(latency_ms)

    def bound_ms(self, name: str) -> float:
        """The slowest that calls of this name may be while an attack goes on."""
        idle = self._idle[name]
        return max(self._floor_ms, 2 * float(np.percentile(idle, 99)) if idle else 0.0)

    def remember_memory(self) -> None:
        """What processes have now is what they must come back to."""
        self._memory = self.target.memory()

    async def attempt(self, attack: Attack, seed: int, size: int) -> Verdict:
        """One attack of one size."""
        strike = attack.make(self.target, random.Random(seed), size)
        await self.quiet()
        began = time.monotonic()
        broken: list[str] = []
        try:
            outcome = await strike()
        except Exception as error:  # a broken invariant of the attack's own, or one that could not be made
            outcome = f"{type(error).__name__}: {str(error)[:300]}"
            if isinstance(error, AssertionError):
                broken.append(outcome)
        seconds = time.monotonic() - began
        await asyncio.sleep(max(_QUIET_S, _MIN_WINDOW_S - seconds))
        calls = await self._calls(began, time.monotonic())
        broken += self._felt(calls) + await self._harm()
        worst_ms = max((latency_ms for _, latency_ms, _ in calls), default=0.0)
        surface = attack.surface
        self.course.cases += 1
        self.course.by_surface[surface] += 1
        self.course.worst_ms[surface] = max(self.course.worst_ms[surface], worst_ms)
        return Verdict(outcome, round(seconds, 2), len(calls), worst_ms, tuple(broken))

    async def judge(self, attack: Attack, seed: int, size: int) -> Verdict:
        """As `attempt`; what breaks an invariant is tried again, and shrunk where it does so most of the time."""
        verdict = await self.attempt(attack, seed, size)
        if not verdict.broken:
            return verdict
        is_sure = any(each.startswith(("replaced", "log")) for each in verdict.broken)
        tries = (
            [verdict] if is_sure else [verdict, *[await self.attempt(attack, seed, size) for _ in range(_TRIES - 1)]]
        )
        if not is_sure and sum(bool(each.broken) for each in tries) < 2:
            return verdict
        smallest, found = size, verdict
        while (smaller := smallest // 2) >= attack.least:
            again = await self.attempt(attack, seed, smaller)
            if not again.broken:
                break
            smallest, found = smaller, again
        shown = tuple(dict.fromkeys((*verdict.broken, *found.broken)))
        self.course.findings.append(Finding(attack.title, seed, smallest, attack.unit, shown, verdict.outcome))
        return verdict

    async def check_memory(self, attack: Attack, seed: int, size: int) -> None:
        """After a pause every process has the memory that it had, or there is a finding."""
        end = time.monotonic() + BACK_WITHIN_S
        while (grown := self._grown()) and time.monotonic() < end:
            await self.quiet(2.0)
        if grown:
            kept = tuple(f"memory of {name}: {before:.0f} → {now:.0f} MiB" for name, (before, now) in grown.items())
            self.course.findings.append(Finding(attack.title, seed, size, attack.unit, kept, ""))
            self.remember_memory()

    def _grown(self) -> dict[str, tuple[float, float]]:
        now = self.target.memory()
        return {
            name: (before, now[name])
            for name, before in self._memory.items()
            if name in now and now[name] - before > GROWTH_MIB + GROWTH_SHARE * before
        }

    async def _calls(self, began: float, until: float) -> list[tuple[str, float, str]]:
        """Name, latency and outcome of the second client's calls that were due in a time, once all have ended."""
        done, late = [], []
        while True:
            taken = await asyncio.to_thread(self._second.ask, "take")
            done += taken["calls"]
            late += taken["late"]
            if all(due > until for _, due in taken["waiting"]):
                break
            await asyncio.sleep(_POLL_S)
        return [
            (name, latency_ms - own_ms(late, due, latency_ms), outcome)
            for name, due, latency_ms, outcome in done
            if began <= due <= until
        ]

    def _felt(self, calls: Iterable[tuple[str, float, str]]) -> list[str]:
        calls = list(calls)
        failed = sorted({f"{name} {outcome}" for name, _, outcome in calls if outcome != OK})
        slow = [(latency_ms, name) for name, latency_ms, _ in calls if latency_ms > self.bound_ms(name)]
        found = [f"failed: {', '.join(failed)[:300]}"] if failed else []
        if len(slow) > MAX_SLOW:
            worst_ms, name = max(slow)
            names = ", ".join(sorted({name for _, name in slow}))
            found.append(f"slow: {len(slow)} of {len(calls)} calls, {name} {worst_ms:.0f} ms ({names})")
        return found

    async def _harm(self) -> list[str]:
        """What is broken of processes, probes and logs. What was replaced is waited for."""
        found = []
        missed = await asyncio.to_thread(self.target.missed)
        if missed != self._missed:
            changes = {name: count for name, count in missed.items() if count != self._missed.get(name, 0)}
            found += [f"missed: {changes}"] if changes else []
            self._missed = missed
        lives = await asyncio.to_thread(self.target.lives)
        if lives != self._lives:
            gone = {name: (self._lives[name], now) for name, now in lives.items() if now != self._lives[name]}
            found.append(f"replaced: {gone}")
            await asyncio.to_thread(self.target.await_healthy)
            self._lives = await asyncio.to_thread(self.target.lives)
            self.remember_memory()
        return [*found, *(f"log: {line}" for line in self.target.new_traces()[:3])]


def own_ms(late: Iterable[tuple[float, float]], due: float, latency_ms: float) -> float:
    """For how much of a call the second client itself did not run."""
    ended = due + latency_ms / 1e3
    overlaps = (min(ended, at + ms / 1e3) - max(due, at) for at, ms in late)
    return sum(max(0.0, each) for each in overlaps) * 1e3
