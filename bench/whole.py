"""`bench all`: every scenario of the report, each in a process of its own, then the page.

One that fails, or changes its process, changes no other. A record of the run is written as `results/all-DATE.json`,
which the page shows: the commit it began at, its options, each scenario's status, and what was left out and why.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench import LIMITS_S, SCENARIOS, machine, progress
from bench.report import RESULTS


@dataclass(frozen=True, slots=True)
class Step:
    """A scenario with its options; `limit_s` where the default of the scenario is too little."""

    scenario: str
    options: tuple[str, ...] = ()
    limit_s: float | None = None

    @property
    def most_s(self) -> float:
        """Seconds after which it is ended."""
        return self.limit_s or LIMITS_S.get(self.scenario, _DEFAULT_LIMIT_S)


_PRECISIONS = ("float32", "bfloat16", "int8")
STEPS: dict[str, Step] = {
    "engine": Step("engine"),
    "peers": Step("peers"),
    "peers-base": Step("peers", ("--shape", "base")),
    "peers-large": Step("peers", ("--shape", "large"), 2400.0),
    "peers-xlm-r-reranker": Step("peers", ("--shape", "xlm-r-reranker")),
    "peers-splade": Step("peers", ("--shape", "splade")),
    "peers-modernbert": Step("peers", ("--shape", "modernbert")),
    "peers-qwen3": Step("peers", ("--shape", "qwen3")),
    "forward": Step("forward"),
    "rerank": Step("rerank"),
    "stages": Step("stages"),
    "start": Step("start"),
    "mux": Step("mux"),
    "latency": Step("latency"),
    "bimodal": Step("bimodal"),
    "monsters": Step("monsters"),
    "neighbours": Step("neighbours"),
    "front": Step("front"),
    "servers": Step("servers"),
    "growth": Step("growth"),
    "fidelity": Step("fidelity", ("--dtype", *_PRECISIONS), 3600.0),
    "guard": Step("guard"),
    "html": Step("html"),
}
"""What `all` runs, in its order; the page is last."""
PAGE = "html"
_PROGRAMS = ("infinity", "tei", "tei-manager", "vllm")
_DEFAULT_LIMIT_S = 600.0
_END_S = 300.0  # beyond its limit a scenario writes what it has and stops its servers


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `all`."""
    parser.add_argument("--only", nargs="+", choices=tuple(STEPS), default=tuple(STEPS), help="these of them")
    parser.add_argument("--skip", nargs="+", choices=tuple(STEPS), default=[], help="not these")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="PATH",
        help="another checkout, for front: 534a7b9 is the one that the targets were set for",
    )
    for program in _PROGRAMS:
        parser.add_argument(f"--{program}", type=Path, metavar="PATH", help=f"the program, for servers: {program}")
        parser.add_argument(f"--{program}-arguments", default="", metavar="'...'", help="further arguments of it")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run does: the options of each step by its name, and the steps left out with the reason."""

    steps: Mapping[str, Sequence[str]]
    skipped: Mapping[str, str]


def planned(options: argparse.Namespace) -> Plan:
    """The steps that these options choose, with paths passed on to the scenarios that take them."""
    programs = _given_programs(options)
    steps: dict[str, Sequence[str]] = {}
    skipped: dict[str, str] = {}
    for name, step in STEPS.items():
        passed = [*step.options]
        if step.limit_s is not None:
            passed += ["--limit", f"{step.limit_s:g}"]
        if step.scenario == "front" and options.against is not None:
            passed += ["--against", str(options.against)]
        if step.scenario == "servers":
            passed += programs
        if name not in options.only:
            continue
        if name in options.skip:
            skipped[name] = "--skip names it"
        elif step.scenario not in SCENARIOS:
            skipped[name] = "this checkout has no such scenario"
        elif step.scenario == "servers" and not programs:
            skipped[name] = "the program of no peer was given (" + ", ".join(f"--{each}" for each in _PROGRAMS) + ")"
        else:
            steps[name] = passed
    return Plan(steps, skipped)


def _given_programs(options: argparse.Namespace) -> list[str]:
    """Options of `servers`."""
    passed = []
    for program in _PROGRAMS:
        key = program.replace("-", "_")
        if path := getattr(options, key):
            passed += [f"--{program}", str(path)]
            if further := getattr(options, f"{key}_arguments"):
                passed.append(f"--{program}-arguments={further}")
    return passed


@dataclass(slots=True)
class _Run:
    """The course of a run, for its record."""

    began_at: str
    date: str
    options: Sequence[str]
    skipped: Mapping[str, str]
    statuses: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """For the JSON file: the options without paths, which are of this machine."""
        return {
            "scenario": "all",
            "date": self.date,
            "began_at": self.began_at,
            "options": list(self.options),
            "skipped": dict(self.skipped),
            "statuses": self.statuses,
            "seconds": {name: round(seconds, 1) for name, seconds in self.seconds.items()},
        }

    def write(self) -> None:
        (RESULTS / f"all-{self.date}.json").write_text(json.dumps(self.record(), indent=2) + "\n")


def run(options: argparse.Namespace, given: Sequence[str]) -> int:
    """Run the steps and print how each ended; the highest status of them. `given` is the command line."""
    plan = planned(options)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    course = _Run(machine.revision(), today, names_of(given), plan.skipped)
    is_whole = set(options.only) == set(STEPS)
    environ = os.environ | {machine.START: course.began_at}
    progress.say(f"at commit {course.began_at}")
    for name, why in plan.skipped.items():
        progress.say(f"LEFT OUT, {name}: {why}")
    interrupts: list[int] = []
    for name, passed in plan.steps.items():
        if name == PAGE and is_whole:
            course.write()  # which the page shows
        most_s, began = STEPS[name].most_s, time.monotonic()
        progress.say(f"{name}, at most {most_s:g} s")
        command = [sys.executable, "-m", "bench", STEPS[name].scenario, *passed]
        course.statuses[name] = _in_own_process(command, environ, most_s + _END_S, interrupts)
        course.seconds[name] = time.monotonic() - began
        progress.say(f"{name} ended with status {course.statuses[name]} after {course.seconds[name]:.0f} s")
        if interrupts:
            break
    if is_whole:
        course.write()
    ended = (f"{name}: {'done' if not status else f'status {status}'}" for name, status in course.statuses.items())
    print("\n".join((*ended, *(f"{name}: left out, {why}" for name, why in plan.skipped.items()))))
    return max(course.statuses.values(), default=0)


def names_of(given: Sequence[str]) -> list[str]:
    """The names of options alone, and the values of those that have no path or program of this machine."""
    found: list[str] = []
    is_private = False
    for word in given:
        if word.startswith("--"):
            name = word.partition("=")[0]
            is_private = name == "--against" or name.removeprefix("--").removesuffix("-arguments") in _PROGRAMS
            found.append(name if is_private else word)
        elif not is_private:
            found.append(word)
    return found


def _in_own_process(command: Sequence[str], environ: Mapping[str, str], most_s: float, interrupts: list[int]) -> int:
    """Its status; signals are added to `interrupts` and end the scenario, which writes what it has."""
    with subprocess.Popen(command, start_new_session=True, env=environ) as process:

        def pass_on(number: int, frame: object) -> None:
            interrupts.append(number)
            process.send_signal(signal.SIGINT)

        former = [(number, signal.signal(number, pass_on)) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            return process.wait(most_s)
        except subprocess.TimeoutExpired:
            # Its daemon and its children have sessions of their own, and would run beside the next one.
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            return 1
        finally:
            for number, handler in former:
                signal.signal(number, handler)
