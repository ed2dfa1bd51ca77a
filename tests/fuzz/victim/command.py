"""`dev.py soak fuzz --victim`: attacks of every surface, one after the other, while a second client makes small calls.

What it checks: the second client's calls succeed, their p99 stays within twice that of idle times (and 250 ms, on two
cores that others use); no daemon, multiplexer or worker is replaced and no health probe missed; no process keeps memory
after a pause; no traceback is logged. A finding names the attack, the seed and the smallest size that shows it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.contest import child

from tests.faults.results import markdown, write
from tests.fuzz.victim import bodies, changes, connections, frames, recordings
from tests.fuzz.victim.attack import Attack
from tests.fuzz.victim.target import Target, running
from tests.fuzz.victim.trial import FLOOR_MS, Course, Finding, Trial

TLS = "tls"
_RATE = 10.0
_IDLE_S = 5.0


def attacks() -> list[Attack]:
    """All of them, in the order of their surfaces."""
    return [each for module in (bodies, connections, frames, changes, recordings) for each in module.attacks()]


def main(arguments: Sequence[str]) -> int:
    """Run, print what is found, write the report."""
    known = attacks()
    surfaces = list(dict.fromkeys(each.surface for each in known))
    parser = argparse.ArgumentParser(prog="dev.py soak fuzz --victim", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of the whole run (60)")
    parser.add_argument("--seed", type=int, default=1, help="of the order, the sizes and the inputs (1)")
    parser.add_argument("--surface", nargs="+", choices=surfaces, default=surfaces, help="surfaces (all)")
    parser.add_argument("--attack", default="", help="only attacks with this in their title")
    parser.add_argument("--size", type=int, help="one attempt of this size for each attack, as a finding names it")
    parser.add_argument("--floor-ms", type=float, default=FLOOR_MS, help=f"what is never slow ({FLOOR_MS:g})")
    parser.add_argument("--report", type=Path, help="folder for victim.json and victim.md")
    options = parser.parse_args(arguments)
    chosen = [each for each in known if each.surface in options.surface and options.attack in each.title]
    began, courses = time.monotonic(), []
    for is_tls in (False, True):
        part = [each for each in chosen if (each.surface == TLS) == is_tls]
        if part:
            seconds = options.minutes * 60 * len(part) / len(chosen)
            with running(tls=is_tls) as target:
                courses.append(asyncio.run(_run(target, part, seconds, options)))
    lines = table(courses)
    print("\n".join(lines))
    if options.report:
        facts = {
            "seconds": round(time.monotonic() - began),
            "seed": options.seed,
            "courses": [vars(c) for c in courses],
        }
        write(options.report, "victim", "Attacks beside a second client", lines, facts)
    return 1 if any(course.findings for course in courses) else 0


async def _run(target: Target, chosen: Sequence[Attack], seconds: float, options: argparse.Namespace) -> Course:
    with ExitStack() as stack:
        second = stack.enter_context(child(target.second_client(_RATE)))
        trial = Trial(target, second, options.floor_ms)
        await trial.quiet(_IDLE_S)
        if options.size is not None:
            for attack in chosen:
                await _judged(trial, attack, options.seed, options.size)
                await trial.check_memory(attack, options.seed, options.size)
            return trial.course
        end = time.monotonic() + seconds
        for attack, seed, sizes in plan(chosen, options.seed):
            if attack is None:
                trial.remember_memory()
                continue
            for size in sizes:
                if time.monotonic() > end:
                    return trial.course
                await _judged(trial, attack, seed, size)
            await trial.check_memory(attack, seed, sizes[-1])
    return trial.course


def plan(chosen: Sequence[Attack], seed: int) -> Iterator[tuple[Attack | None, int, list[int]]]:
    """Attacks with seed and sizes, without end.

    One small of each surface; then None, where the processes are warm; then each attack, growing to its limit; then any
    of them with any size.
    """
    chance = random.Random(seed)
    for attack in {each.surface: each for each in chosen}.values():
        yield attack, seed, [attack.least]
    yield None, seed, []
    for attack in chance.sample(chosen, len(chosen)):
        yield attack, seed, sorted({max(attack.least, attack.most // part) for part in (64, 8, 1)})
    while True:
        attack = chance.choice(chosen)
        size = round(attack.least * (attack.most / attack.least) ** chance.random())
        yield attack, chance.randrange(2**32), [size]


async def _judged(trial: Trial, attack: Attack, seed: int, size: int) -> None:
    before = len(trial.course.findings)
    verdict = await trial.judge(attack, seed, size)
    marks = " BROKEN" if verdict.broken else ""
    print(
        f"{attack.title}, {size} {attack.unit}: {verdict.outcome}, {verdict.seconds:g} s; "
        f"{verdict.calls} calls, at most {verdict.worst_ms:.0f} ms{marks}",
        flush=True,
    )
    for each in verdict.broken:
        print(f"    {each}", flush=True)
    for finding in trial.course.findings[before:]:
        print(f"  FOUND {finding.reproducer}", flush=True)


def table(courses: Sequence[Course]) -> list[str]:
    """The lines of the report."""
    rows = [
        (surface, cases, round(course.worst_ms[surface]), sum(_is_of(each, surface) for each in course.findings))
        for course in courses
        for surface, cases in course.by_surface.items()
    ]
    found = [each for course in courses for each in course.findings]
    header = ("surface", "cases", "second client at most, ms", "findings")
    return [
        *markdown(header, rows),
        *(f"* `{each.reproducer}` ({each.unit}): {'; '.join(each.broken)}"[:700] for each in found),
    ]


def _is_of(finding: Finding, surface: str) -> bool:
    return finding.title.startswith(f"{surface}:")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
