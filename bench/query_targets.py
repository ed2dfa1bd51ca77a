"""Lines of the targets about single calls and interfaces: latencies and requests a second, absolute and as factors.

A factor is over the version that the targets were set for, since they were set on another, faster machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from bench.provenance import Documents
from bench.verdicts import Form, Line, Value

BACK_TO_BACK, EVERY_50_MS = "back to back", "every 50 ms"
"""Paces of `bench latency`."""

# Figures of 534a7b9 on the machine that the targets were set on, in ms, and what was asked.
_FORMER_BACK_TO_BACK = {"queries back to back, p50 ms": 4.0 / 2.1}
_FORMER_PACED = {"one query every 50 ms, p50 ms": 12.5 / 3.0, "one query every 50 ms, p99 ms": 29.0 / 5.0}


def one_query(documents: Documents) -> Iterator[Line]:
    """One query behind the other: in the worker, through the mux, and as a factor."""
    worker = [*_latency(documents, BACK_TO_BACK, "p50", ("teimgr", "worker|engine"), 1.3)]
    if "stages" in documents:
        worker += _stage(documents, "one query: engine", 1.3, "the engine in a process by itself")
    yield Line("in the worker, p50", Form.MS, worker, True, "query", "at most 1.3 ms", "no result of `bench latency`")
    mux = [*_latency(documents, BACK_TO_BACK, "p50", ("teimgr", "mux"), 2.1)]
    if "mux" in documents:
        idle = (row for row in documents["mux"]["rows"] if row["load"] == "one at a time, idle")
        mux += [Value("mux", row["p50"], 2.1) for row in idle]
    mux += _versions(documents, "queries back to back, p50 ms", 2.1)
    if "stages" in documents:
        mux += _stage(documents, "one query: mux Embed, whole", 2.1)
    yield Line("through the mux, p50", Form.MS, mux, True, "query", "at most 2.1 ms", "no result of `bench mux`")
    if peers := [*_latency(documents, BACK_TO_BACK, "p50", ("ONNX",), None)]:
        yield Line("ONNX Runtime in process, p50, beside it", Form.MS, peers, at_most=True)
    yield times_as_fast(documents, "through the mux", _FORMER_BACK_TO_BACK, why="query")


def every_50_ms(documents: Documents) -> Iterator[Line]:
    """One query after each pause, through the mux."""
    for point, asked in (("p50", 3.0), ("p99", 5.0)):
        values = [*_latency(documents, EVERY_50_MS, point, ("teimgr", "mux"), asked)]
        rows = documents.get("bimodal", {}).get("rows", [])[:1]
        values += [Value("bimodal", row[f"idle_{point}_ms"], asked) for row in rows]
        values += _versions(documents, f"one query every 50 ms, {point} ms", asked)
        unmeasured = "no result of `bench latency`"
        yield Line(f"through the mux, {point}", Form.MS, values, True, "paused", f"at most {asked:g} ms", unmeasured)
    yield times_as_fast(documents, "through the mux", _FORMER_PACED, why="paused")


def _stage(documents: Documents, stage: str, asked: float, note: str = "") -> list[Value]:
    rows = (row for row in documents["stages"]["rows"] if row["stage"] == stage)
    return [Value("stages", row["µs"] / 1e3, asked, note) for row in rows]


def _versions(documents: Documents, figure: str, asked: float) -> list[Value]:
    """A latency of this checkout in `bench versions`, with what the version of the targets had in the same run."""
    if "versions" not in documents:
        return []
    there = documents["versions"]["facts"]["there"]
    return [
        Value("versions", row["here"], asked, f"{there} in the same run: {row['there']:.1f} ms")
        for row in documents["versions"]["rows"]
        if row["figure"] == figure
    ]


def _latency(
    documents: Documents, pace: str, point: str, words: tuple[str, ...], asked: float | None
) -> Iterator[Value]:
    """Latencies of `bench latency` at a pace, of the paths whose name has all these patterns."""
    for row in documents["latency"]["rows"] if "latency" in documents else ():
        if all(re.search(word, row["path"], re.IGNORECASE) for word in words):
            yield Value(f"latency, {row['path']}", row["loads"][pace][f"{point}_ms"], asked)


def times_as_fast(documents: Documents, what: str, asked: Mapping[str, float], why: str) -> Line:
    """Figures of `bench versions` as factors over the other checkout; what is asked is the target over its figure."""
    rows = documents["versions"]["rows"] if "versions" in documents else []
    there = documents["versions"]["facts"]["there"] if rows else "534a7b9"
    values = [
        Value(
            _label(row["figure"]),
            row["times"],
            asked[row["figure"]],
            f"paired by round, {row['least']:.2f} to {row['most']:.2f}",
        )
        for row in rows
        if row["figure"] in asked
    ]
    return Line(
        f"{what}, times as fast as {there} (the version of the targets), in turns",
        Form.TIMES,
        values,
        why=why,
        asked="" if values else "at least " + " / ".join(f"{factor:.2f} ×" for factor in asked.values()),
        unmeasured="no result of `bench versions --against PATH`",
    )


def _label(figure: str) -> str:
    """What tells a figure of `bench versions` apart: its texts, or its percentile."""
    if figure.startswith("bulk, "):
        return figure.removeprefix("bulk, ").removesuffix(" texts")
    return figure.rpartition(", ")[2].removesuffix(" ms")


def front(
    documents: Documents, load: str, asked: Mapping[int, tuple[float, float]], p99_ms: float | None = None
) -> Iterator[Line]:
    """An interface around a look-up table: calls a second and p99 by callers, then as factors; `asked` has what 534a7b9
    had and what was asked.
    """
    rows = documents["front"]["rows"] if "front" in documents else []
    passes: dict[tuple[str, int], list[dict[str, Any]]] = {
        (row["checkout"], row["callers"]): row["passes"] for row in rows if row["load"] == load
    }
    unit = "texts" if load.startswith("EmbedArrow") else "requests"
    why = f"front {load}"
    rates, p99s, factors = [], [], []
    for callers, (former, wanted) in asked.items():
        own, other = passes.get(("here", callers), []), passes.get(("against", callers), [])
        label = f"{callers} callers" if callers > 1 else "one caller"
        if own:
            note = ""
            if other:
                rate = median(each["calls"] / each["seconds"] for each in other)
                note = f"the version of the targets: {former:,} where they were set, {rate:,.0f} here"
            rates.append(Value(label, median(each["calls"] / each["seconds"] for each in own), wanted, note))
        if own and p99_ms and all(each.get("p99_ms") for each in own):
            p99s.append(Value(label, median(each["p99_ms"] for each in own), p99_ms))
        pairs = zip(own, other, strict=False)
        times = [here["calls"] / here["seconds"] * there["seconds"] / there["calls"] for here, there in pairs]
        if times:
            note = f"paired by round, {min(times):.2f} to {max(times):.2f}"
            factors.append(Value(label, median(times), wanted / former, note))
    wanted_text = "at least " + " / ".join(f"{wanted:,}" for _, wanted in asked.values())
    yield Line(
        f"{unit} a second", Form.RATE, rates, False, why, "" if rates else wanted_text, "no result of `bench front`"
    )
    if p99_ms:
        unmeasured = "no result of `bench front`"
        yield Line("p99", Form.MS, p99s, True, why, f"at most {p99_ms:g} ms", unmeasured)
    there = documents["front"]["facts"].get("against", "534a7b9") if rows else "534a7b9"
    yield Line(
        f"{unit} a second, times as many as {there} (the version of the targets), in turns",
        Form.TIMES,
        factors,
        why=why,
        asked=""
        if factors
        else "at least " + " / ".join(f"{wanted / former:.2f} ×" for former, wanted in asked.values()),
        unmeasured="no result of `bench front --against PATH`",
    )
