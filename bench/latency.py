"""`bench latency`: single queries in process beside OpenVINO and ONNX Runtime, and through a daemon's interfaces."""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench import corpus, weights
from bench.contest import Child, Row, entrants
from bench.corpora import DESCRIBED, corpora
from bench.encoders import Task
from bench.fleet import Fleet, fleet
from bench.progress import partial, rounds, say
from bench.report import publish

BASELINE = "sentence-transformers, float32"
OURS, THEIRS = "teimgr engine, float32", "ONNX Runtime, float32"
"""Two paths whose ratio is a fact of the result: ours is to take at most 0.8 of their time."""
LOADS = {"back to back": 0.0, "every 50 ms": 0.05}
"""How queries follow each other, and the seconds from the begin of one to that of the next (0: at once)."""
_OF_A_LOAD = ("p50 ms", "p99 ms", "× baseline", "least", "most")
HEADER = (
    *("path", "dtype"),
    *(f"{load}: {name}" if not at else name for load in LOADS for at, name in enumerate(_OF_A_LOAD)),
    "cosine min",
)
_INSTANCE = "bench"
_PACKAGES = {"openvino-latency": "openvino", "onnxruntime": "onnxruntime"}
_WARM_UP_QUERIES = 20  # before each round of an entrant


@dataclass
class Found:
    """One path: of each load the latencies of each round in ms; its precision and lowest cosine to the baseline."""

    path: str
    dtype: str
    latencies_ms: dict[str, list[list[float]]] = field(default_factory=lambda: {load: [] for load in LOADS})
    cosine_min: float = 1.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--queries", type=int, default=200, help="back to back, in a round (200)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one query every 50 ms, in a round (4)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each path (3)")
    parser.add_argument(
        "--only", nargs="+", metavar="PATH", help="measure only paths whose name begins with one of these"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    model = weights.minilm()
    counts = {"back to back": options.queries, "every 50 ms": max(1, round(options.seconds / LOADS["every 50 ms"]))}
    queries = corpora(model, max(counts.values()) // 4 + 1)["short"][: max(counts.values())]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = stack.enter_context(fleet())
        running.client.create(_INSTANCE, str(model))
        running.client.wait_until_running(_INSTANCE, deadline_s=120)
        wanted = tasks(str(model), running, folder)
        missing = {kind for kind, package in _PACKAGES.items() if importlib.util.find_spec(package) is None}
        wanted = {name: task for name, task in wanted.items() if task.kind not in missing}
        if options.only:
            wanted = {name: task for name, task in wanted.items() if name.startswith((BASELINE, *options.only))}
        children = stack.enter_context(entrants(wanted, skip_failing=True))
        failed = ", ".join(wanted.keys() - children.keys())
        notes = {name: child.note for name, child in children.items() if child.note}
        found = [Found(name, child.dtype) for name, child in children.items()]
        with partial():
            _measure(children, found, queries, counts, options.rounds, folder)
        _keep_whole_rounds(found)
        _compare(found, folder)
    facts = {
        "model": "all-MiniLM-L6-v2, the real weights; one instance in the daemon",
        "queries": f"of {DESCRIBED['short']} (digest {corpus.digest(queries)}), one in each call; in process the "
        "tokenizer is part of a path, of the daemon's paths the client with its decoding",
        "method": f"{options.rounds} rounds, each path in turn, in a process of its own with all cores: "
        f"{counts['back to back']} queries back to back, then {counts['every 50 ms']}, one every 50 ms; p50 and p99 "
        "are of all rounds; × is how many times as fast the p50 is as the baseline's of the same round: median, "
        "least, most",
        "latency": "from the begin of a call to its result; no call waits for another",
        "HTTP": "a blocking socket that stays open, numbers as text; gRPC by teimgr's client, and by frames of "
        "HTTP/2 on a blocking socket, since gRPC's library takes a part of the latency",
        **notes,
        "not installed": ", ".join(sorted({_PACKAGES[kind] for kind in missing})) or "none",
        "could not load": failed or "none",
    }
    records = [record(each, found[0]) for each in found]
    facts |= compared_in_float32({each["path"]: each for each in records})
    publish("latency", facts, HEADER, [_line(each) for each in records], {"rows": records})
    return 0


def tasks(model: str, running: Fleet, folder: Path) -> dict[str, Task]:
    """What is measured; the others are compared with the first."""
    cache = str(folder)
    called = Task("grpc", grpc=running.grpc, instance=_INSTANCE)
    rest = f"127.0.0.1:{running.api_port}"
    own_port = f"127.0.0.1:{running.client.get(_INSTANCE).port}"
    return {
        BASELINE: Task("sentence-transformers", model),
        THEIRS: Task("onnxruntime", model),
        "ONNX Runtime, int8": Task("onnxruntime", model, dtype="int8"),
        **{
            f"OpenVINO, {dtype}, latency hint": Task("openvino-latency", model, dtype=dtype, cache=cache)
            for dtype in ("float32", "bfloat16", "int8")
        },
        "teimgr engine, auto": Task("engine", model, dtype="auto"),
        OURS: Task("engine", model, dtype="float32"),
        "teimgr engine, int8": Task("engine", model, dtype="int8"),
        "teimgr daemon, Embed through the mux": called,
        "teimgr daemon, Embed through the mux, without gRPC's library": replace(called, kind="http2"),
        "teimgr daemon, /v1/embeddings": replace(called, kind="openai", http=rest),
        "teimgr daemon, /embed": replace(called, kind="embed", http=own_port),
    }


def _measure(
    children: dict[str, Child], found: list[Found], queries: list[str], counts: dict[str, int], turns: int, folder: Path
) -> None:
    """Add the latencies of each round; results of the first one are kept in `folder`, by the number of the path."""
    (folder / "queries.json").write_text(json.dumps(queries))
    for child in children.values():
        child.ask("texts", str(folder / "queries.json"))
    for number in rounds(turns):
        for at, (each, child) in enumerate(zip(found, children.values(), strict=True)):
            child.ask("queries", {"count": _WARM_UP_QUERIES, "every_s": 0.0, "keep": None})
            for load, every_s in LOADS.items():
                keep = str(folder / f"{at}.npy") if number == 1 and not every_s else None
                asked = {"count": counts[load], "every_s": every_s, "keep": keep}
                each.latencies_ms[load].append(child.ask("queries", asked)["latencies_ms"])
            p50s_ms = {load: median(each.latencies_ms[load][-1]) for load in LOADS}
            say(f"  {each.path}: " + ", ".join(f"{load} {p50_ms:.2f} ms" for load, p50_ms in p50s_ms.items()))


def _keep_whole_rounds(found: list[Found]) -> None:
    """Leave out what an interrupted round gave.

    Raises:
        KeyboardInterrupt: not one round is whole.
    """
    whole = min(len(turns) for each in found for turns in each.latencies_ms.values())
    if not whole:
        raise KeyboardInterrupt
    for each in found:
        each.latencies_ms = {load: turns[:whole] for load, turns in each.latencies_ms.items()}


def _compare(found: list[Found], folder: Path) -> None:
    reference = np.load(folder / "0.npy")
    for at, each in enumerate(found):
        row = Row(each.path)
        row.compare(np.load(folder / f"{at}.npy"), reference)
        each.cosine_min = row.cosine_min


def record(each: Found, baseline: Found) -> dict[str, Any]:
    """A path for the JSON file: per load p50 and p99 of all rounds and of each, and ratios paired by round."""
    loads = {}
    for load, turns in each.latencies_ms.items():
        p50_ms, p99_ms = np.percentile(np.concatenate(turns), (50, 99)).tolist()
        p50s_ms, p99s_ms = np.percentile(turns, (50, 99), axis=1).tolist()
        theirs = np.percentile(baseline.latencies_ms[load], 50, axis=1).tolist()
        paired = [their_ms / own_ms for own_ms, their_ms in zip(p50s_ms, theirs, strict=True)]
        loads[load] = {
            "p50_ms": p50_ms,
            "p99_ms": p99_ms,
            "times_baseline": {"median": median(paired), "least": min(paired), "most": max(paired)},
            "rounds": {"p50_ms": p50s_ms, "p99_ms": p99s_ms},
        }
    return {"path": each.path, "dtype": each.dtype, "loads": loads, "cosine_min": each.cosine_min}


def compared_in_float32(records: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Ours beside ONNX Runtime, p50 by p50 of each round, where both were measured."""
    if OURS not in records or THEIRS not in records:
        return {}
    said = []
    for load, own in records[OURS]["loads"].items():
        theirs = records[THEIRS]["loads"][load]["rounds"]["p50_ms"]
        paired = [own_ms / their_ms for own_ms, their_ms in zip(own["rounds"]["p50_ms"], theirs, strict=True)]
        said.append(f"{load} {median(paired):.2f} ({min(paired):.2f} to {max(paired):.2f})")
    return {f"{OURS} ÷ {THEIRS}, p50": ", ".join(said)}


def _line(found: dict[str, Any]) -> list[Any]:
    cells = [found["path"], found["dtype"]]
    for load in found["loads"].values():
        cells += [load["p50_ms"], load["p99_ms"], *load["times_baseline"].values()]
    return [*cells, f"{found['cosine_min']:.5f}"]
