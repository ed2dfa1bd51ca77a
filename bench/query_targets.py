"""Lines of the targets about single calls and interfaces: latencies, and requests a second.

Requests a second are shown as factors too, over the version that the targets were set for: that was on another machine.
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


def one_query(documents: Documents) -> Iterator[Line]:
    """One query behind the other: in the worker and through the mux."""
    worker = [*_latency(documents, BACK_TO_BACK, "p50", ("teimgr", "worker|engine"), 1.3)]
    if "stages" in documents:
        worker += _stage(documents, "one query: engine", 1.3, "the engine in a process by itself")
    yield Line("in the worker, p50", Form.MS, worker, True, "query", "at most 1.3 ms", "no result of `bench latency`")
    mux = [*_latency(documents, BACK_TO_BACK, "p50", ("teimgr", "mux"), 2.1)]
    if "mux" in documents:
        idle = (row for row in documents["mux"]["rows"] if row["load"] == "one at a time, idle")
        mux += [Value("mux", row["p50"], 2.1) for row in idle]
    if "stages" in documents:
        mux += _stage(documents, "one query: mux Embed, whole", 2.1)
    yield Line("through the mux, p50", Form.MS, mux, True, "query", "at most 2.1 ms", "no result of `bench mux`")
    if peers := [*_latency(documents, BACK_TO_BACK, "p50", ("ONNX",), None)]:
        yield Line("ONNX Runtime in process, p50, beside it", Form.MS, peers, at_most=True)


def every_50_ms(documents: Documents) -> Iterator[Line]:
    """One query after each pause, through the mux."""
    for point, asked in (("p50", 3.0), ("p99", 5.0)):
        values = [*_latency(documents, EVERY_50_MS, point, ("teimgr", "mux"), asked)]
        rows = documents.get("bimodal", {}).get("rows", [])[:1]
        values += [Value("bimodal", row[f"idle_{point}_ms"], asked) for row in rows]
        unmeasured = "no result of `bench latency`"
        yield Line(f"through the mux, {point}", Form.MS, values, True, "paused", f"at most {asked:g} ms", unmeasured)


def _stage(documents: Documents, stage: str, asked: float, note: str = "") -> list[Value]:
    rows = (row for row in documents["stages"]["rows"] if row["stage"] == stage)
    return [Value("stages", row["µs"] / 1e3, asked, note) for row in rows]


def _latency(
    documents: Documents, pace: str, point: str, words: tuple[str, ...], asked: float | None
) -> Iterator[Value]:
    """Latencies of `bench latency` at a pace, of the paths whose name has all these patterns."""
    for row in documents["latency"]["rows"] if "latency" in documents else ():
        if all(re.search(word, row["path"], re.IGNORECASE) for word in words):
            yield Value(f"latency, {row['path']}", row["loads"][pace][f"{point}_ms"], asked)


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
