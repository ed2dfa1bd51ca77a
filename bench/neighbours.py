"""`bench neighbours`: what a second instance, idle or busy, costs the bulk rate of the first."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench import corpus, weights
from bench.contest import Child, child
from bench.encoders import Task
from bench.fleet import Fleet, fleet
from bench.progress import partial, rounds, say
from bench.report import publish

HEADER = ("checkout", "beside", "texts/s", "least", "most", "of alone")
_MEASURED, _NEIGHBOUR = "measured", "neighbour"
_ALONE, _IDLE, _BUSY = "no other instance", "an idle instance", "an instance with bulk work"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--texts", type=int, default=500, help="texts of a pass (500)")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each kind, taking turns (5)")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, measured in the same run")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    checkouts = {"this": None} | ({"other": options.against} if options.against else {})
    rates: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as open_, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(corpus.corpus(options.texts)))
        parts = {name: open_.enter_context(_served(path, file)) for name, path in checkouts.items()}
        with partial():
            for _ in rounds(options.rounds):
                for name, (running, measured, neighbour) in parts.items():
                    for beside in (_ALONE, _IDLE, _BUSY):
                        rate = options.texts / _pass(running, measured, neighbour, beside)
                        rates.setdefault((name, beside), []).append(rate)
                        say(f"  {name}, {beside}: {rate:.1f} texts/s")
    rows = [_row(name, beside, values, rates[name, _ALONE]) for (name, beside), values in rates.items()]
    facts = {
        "models": "all-MiniLM-L6-v2 twice, by EmbedArrow, a process of its own for each",
        "texts": f"{options.texts} of mixed length (digest {corpus.digest(corpus.corpus(options.texts))})",
        "rounds": f"{options.rounds}, taking turns; medians; between passes the other instance is stopped and started",
    }
    keys = ("checkout", "beside", "texts_per_s", "least", "most", "of_alone")
    publish("neighbours", facts, HEADER, [[row[key] for key in keys] for row in rows], {"rows": rows})
    return 0


@contextmanager
def _served(checkout: Path | None, file: Path) -> Iterator[tuple[Fleet, Child, Child]]:
    """A fleet with both instances, and the callers of each."""
    with fleet(checkout) as running, ExitStack() as open_:
        callers = []
        for instance in (_MEASURED, _NEIGHBOUR):
            running.client.create(instance, str(weights.minilm()))
            running.client.wait_until_running(instance, deadline_s=120)
            caller = open_.enter_context(child(Task("served", grpc=running.grpc, instance=instance)))
            caller.ask("texts", str(file))
            caller.ask("pass")  # warm
            callers.append(caller)
        yield running, callers[0], callers[1]


def _pass(running: Fleet, measured: Child, neighbour: Child, beside: str) -> float:
    """The seconds of one pass."""
    if beside == _ALONE:
        running.client.stop(_NEIGHBOUR)
    elif running.client.get(_NEIGHBOUR).status != "running":
        running.client.start(_NEIGHBOUR)
        running.client.wait_until_running(_NEIGHBOUR, deadline_s=120)
    if beside != _BUSY:
        return float(measured.ask("pass")["seconds"])
    with ThreadPoolExecutor(1) as other:
        # Of three passes in a row the second is measured: the other caller works all the time.
        working = other.submit(lambda: [neighbour.ask("pass") for _ in range(3)])
        measured.ask("pass")
        seconds = float(measured.ask("pass")["seconds"])
        working.result()
    return seconds


def _row(name: str, beside: str, values: list[float], alone: list[float]) -> dict[str, Any]:
    return {
        "checkout": name,
        "beside": beside,
        "texts_per_s": median(values),
        "least": min(values),
        "most": max(values),
        "of_alone": median(value / whole for value, whole in zip(values, alone, strict=False)),  # of whole rounds
    }
