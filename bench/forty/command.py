"""The scenario: first answers of each model, random calls of all of them, two models in turn, and the report."""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.fleet import Fleet, fleet
from bench.forty import catalogue
from bench.forty.calls import CALLS, alone, post
from bench.forty.catalogue import Model
from bench.forty.residence import Stay, stays
from bench.forty.traffic import BROKEN, REFUSED, RIGHT, WRONG, Outcome, drive
from bench.forty.watching import Seen, watching
from bench.progress import partial, say
from bench.report import publish
from teimgr.spec import State

HEADER = ("call", "calls", "p50 s", "p99 s", "longest s")
_LIMIT_S = 120.0
_LOOK_S = 0.005
_PAGE_CACHE = "cold: weights on the disk"
_STAGED = "staged: weights in the page cache"
_WARM = "warm: loaded"
_RANDOM = "random calls, loaded or not"
_IN_TURN = "two in turn, memory for one"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--minutes", type=float, default=10, help="of random calls (10)")
    parser.add_argument("--models", type=int, default=40, help="declared models (40)")
    parser.add_argument("--callers", type=int, default=8, help="callers at a time (8)")
    parser.add_argument("--turns", type=int, default=50, help="calls of two models in turn, with memory for one (50)")


@dataclass
class Found:
    """All that was measured."""

    budget_mib: int
    taken: dict[str, list[float]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    seen: Seen = field(default_factory=Seen)

    def broken(self) -> list[str]:
        """What must not be, in words; empty for a run as it should be."""
        wrong = [each for each in self.outcomes if each.result in (WRONG, BROKEN)]
        short = [each for each in self.stays() if each.is_too_short]
        failed = [event for event in self.seen.events if event["event"] in ("crashed", "failed", "over_memory")]
        return [
            *(f"{each.surface} of {each.model}: {each.result}: {each.why}" for each in wrong),
            *(f"evicted before its load time of {each.least_s:.3g} s: {each.reason}" for each in short),
            *(f"{event['event']}: {event['instance']}: {event['reason']}" for event in failed),
            *(["no call was answered"] if not self.outcomes else []),
            *([f"{self._mib:.0f} MiB taken of {self.budget_mib}"] if self._mib > self.budget_mib else []),
        ]

    def stays(self) -> list[Stay]:
        answered = [each.answered for each in self.outcomes if each.result == RIGHT]
        return stays(self.seen.events, answered)

    @property
    def _mib(self) -> float:
        return self.seen.most_bytes / 2**20

    def facts(self, options: argparse.Namespace) -> dict[str, Any]:
        """The lines above the table."""
        count = Counter(each.result for each in self.outcomes)
        over = [each.seconds for each in self.outcomes]
        judged = [each for each in self.stays() if each.is_used_again]
        least = min((each.seconds / each.least_s for each in judged), default=None)
        return {
            "models": f"{options.models} declared on demand, memory for {catalogue.AT_ONCE}: {self.budget_mib} MiB",
            "calls": f"{len(over)} of {options.callers} callers in {options.minutes:g} min over "
            f"{len({each.surface for each in self.outcomes})} interfaces: {count[RIGHT]} right, "
            f"{count[REFUSED]} refused with a reason, {count[WRONG]} wrong, {count[BROKEN]} broken",
            "memory": f"{self._mib:.0f} MiB of the workers' own at most in {len(self.seen.memory)} samples, "
            f"{self.seen.most_workers} workers at most",
            "evictions": f"{len(self.stays())}, of which {len(judged)} of models with further calls: "
            + (f"stayed {least:.2f} load times at least" if least is not None else "none to judge"),
            "broken": "; ".join(self.broken()) or "nothing",
        }


def run(options: argparse.Namespace) -> int:
    """Measure, print, write; 1 where a call, the memory or a stay was not as it should be."""
    with tempfile.TemporaryDirectory(prefix="tf") as place:
        made = catalogue.build(Path(place), options.models)
        found = Found(catalogue.budget_mib(made))
        say(f"{len(made)} models, {found.budget_mib} MiB")
        with partial():
            with fleet(host_memory_budget_mib=str(found.budget_mib), inference_timeout_secs="110") as running:
                _under_load(running, made, found, options)
            _in_turn(made, found, options.turns)
    rows = [
        [name, len(each), _quantile(each, 0.5), _quantile(each, 0.99), max(each)] for name, each in found.taken.items()
    ]
    data = {
        "seconds": found.taken,
        "refused": [asdict(each) for each in found.outcomes if each.result == REFUSED],
        "slowest": [asdict(each) for each in sorted(found.outcomes, key=lambda each: -each.seconds)[:20]],
        "stays": [asdict(each) for each in found.stays()],
        "most_bytes": found.seen.most_bytes,
    }
    publish("forty", found.facts(options), HEADER, rows, data)
    return int(bool(found.broken()))


def _under_load(running: Fleet, made: Sequence[Model], found: Found, options: argparse.Namespace) -> None:
    _await_mux(running)
    _create(running, made[0])
    _call(running, made[0])  # the fork server has imported torch
    _unload(running, made[0])
    with watching(running) as found.seen:
        right: dict[str, Sequence[np.ndarray]] = {}
        taken: dict[str, list[float]] = {_PAGE_CACHE: [], _STAGED: [], _WARM: []}
        for number, model in enumerate(made, 1):
            if number % 10 == 0:
                say(f"{number} models")
            if model is not made[0]:
                _create(running, model)
            _drop_pages(model.folder)
            taken[_PAGE_CACHE].append(_call(running, model))
            taken[_WARM].append(_call(running, model))
            right[model.name] = alone(running, model.name, model.kind)
            if model.kind == "dense":  # only these are unloaded by a call
                _unload(running, model)
                taken[_STAGED].append(_call(running, model))
                _unload(running, model)
        found.taken |= taken
        say("each was called alone")
        found.outcomes = drive(running, made, right, 60 * options.minutes, options.callers)
        found.taken[_RANDOM] = [each.seconds for each in found.outcomes]
        say(f"{len(found.outcomes)} calls")


def _in_turn(made: Sequence[Model], found: Found, turns: int) -> None:
    """Two of the largest dense models, with memory for one."""
    two = [each for each in made if each.kind == "dense"][-2:]
    with fleet(host_memory_budget_mib=str(catalogue.budget_mib(two, 1))) as running:
        _await_mux(running)
        for model in two:
            _create(running, model)
            _call(running, model)
        found.taken[_IN_TURN] = []
        for number in range(turns):
            found.taken[_IN_TURN].append(_call(running, two[number % 2]))
            if running.client.get(two[1 - number % 2].name).status is State.RUNNING:
                raise RuntimeError("the memory for one model holds both")


def _create(running: Fleet, model: Model) -> None:
    running.client.create(model.name, str(model.folder), **catalogue.KEYS)


def _call(running: Fleet, model: Model) -> float:
    """The seconds of one call over the first interface of HTTP that fits, else of gRPC."""
    surface = [*CALLS[model.kind].values()][-1]
    began = time.perf_counter()
    surface(running, model.name, 0)
    return time.perf_counter() - began


def _unload(running: Fleet, model: Model) -> None:
    """Raises RuntimeError: it stays."""
    post(running, "/api/generate", {"model": model.name, "keep_alive": 0})
    end = time.monotonic() + _LIMIT_S
    while running.client.get(model.name).status is not State.UNLOADED:
        if time.monotonic() > end:
            raise RuntimeError(f"{model.name} is not unloaded")
        time.sleep(_LOOK_S)


def _drop_pages(folder: Path) -> None:
    """Have the kernel forget the pages of a model's files."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _await_mux(running: Fleet) -> None:
    """Raises RuntimeError: the port of gRPC does not open."""
    end = time.monotonic() + _LIMIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", running.grpc_port)).close()
        except OSError:
            if time.monotonic() > end:
                raise RuntimeError("the multiplexer does not listen") from None
            time.sleep(_LOOK_S)
        else:
            return


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
