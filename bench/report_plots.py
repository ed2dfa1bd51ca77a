"""Plots of the report: throughput against latency, latency against load, memory of added models, growth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

from docsite.plots import PLOTS, Bar, bars, curves, load, newest, source

Points = list[tuple[float, float]]


def front_points(document: Mapping[str, Any]) -> dict[tuple[str, int], tuple[float, float | None]]:
    """Load and callers → calls (of the client's bulk jobs texts) a second and p99 in ms, of this checkout's passes."""
    found = {}
    for row in (row for row in document["rows"] if row["checkout"] == "here"):
        p99s_ms = [each["p99_ms"] for each in row["passes"] if each.get("p99_ms")]
        rate = median(each["calls"] / each["seconds"] for each in row["passes"])
        found[row["load"], row["callers"]] = (rate, median(p99s_ms) if p99s_ms else None)
    return found


def _several(lines: dict[str, Points]) -> dict[str, Points]:
    return {name: points for name, points in lines.items() if len(points) > 1}


def _interfaces() -> Iterator[str]:
    """Throughput against latency and latency against load, a line for each interface."""
    name = newest("front")
    rates: dict[str, Points] = {}
    latencies: dict[str, Points] = {}
    for (interface, callers), (rate, p99_ms) in front_points(load(name)).items():
        if p99_ms:
            rates.setdefault(interface, []).append((rate, p99_ms))
            latencies.setdefault(interface, []).append((callers, p99_ms))
    if several := _several(rates):
        yield curves(
            "Interfaces around a look-up table, from 1 to 256 callers", ("calls/s", "p99 in ms"), source(name), several
        )
        axes = ("callers", "p99 in ms")
        yield curves("Interfaces around a look-up table", axes, source(name), _several(latencies))


def _queries() -> Iterator[str]:
    """Latency of queries against how many are in flight, and against how many are answered."""
    name = newest("mux")
    rows = [row for row in load(name)["rows"] if row["load"].endswith(", idle") and row["p50"]]

    def in_flight(row: Mapping[str, Any]) -> float:
        return 1.0 if row["load"].startswith("one") else float(row["load"].split()[0])

    points = ("p50", "p99")
    by_load = {point: [(in_flight(row), row[point]) for row in rows] for point in points}
    by_rate = {point: [(row["requests_per_s"], row[point]) for row in rows] for point in points}
    yield curves("Queries of MiniLM through the mux", ("calls in flight", "ms"), source(name), by_load)
    yield curves("Queries of MiniLM through the mux", ("calls/s", "ms"), source(name), by_rate)


def _bimodal() -> Iterator[str]:
    name = newest("bimodal")
    row = load(name)["rows"][0]
    values = [
        Bar(f"{when}: {point}", row[f"{when}_{point}_ms"], when == "beside")
        for point in ("p50", "p99")
        for when in ("idle", "beside")
    ]
    yield bars("20 queries a second, idle and beside bulk", "ms", source(name), values, ".1f")


def _servers() -> Iterator[str]:
    """The servers of peers: throughput against latency of single texts, then texts a second of every load."""
    name = newest("servers")
    rows = load(name)["rows"]
    texts = {row["load"]: 64 if "× 64" in row["load"] else 1 for row in rows}
    lines: dict[str, Points] = {}
    for row in rows:
        if texts[row["load"]] == 1:
            for server, passes in (("teimgr", row["own"]), (row["peer"], row["theirs"])):
                point = (_rate(passes, 1), median(each["p50_ms"] for each in passes))
                lines.setdefault(f"{server}, {row['load']}", []).append(point)
    distinct = {server: sorted(set(points)) for server, points in lines.items()}
    if several := _several(distinct):
        axes = ("texts/s", "p50 in ms")
        yield curves("Servers, MiniLM, single texts by 1 to 64 callers", axes, source(name), several)
    values: dict[str, Bar] = {}
    for row in rows:
        own, _, others = row["load"].partition(" ÷ ")
        for name_of, what, passes in (("teimgr", own, row["own"]), (row["peer"], others or own, row["theirs"])):
            label = f"{what}, {row['callers']} callers: {name_of}"
            values[label] = Bar(label, _rate(passes, texts[row["load"]]), name_of == "teimgr")
    yield bars("Servers, MiniLM", "texts/s", source(name), list(values.values()))


def _rate(passes: list[dict[str, float]], texts: int) -> float:
    return median(each["calls"] / each["seconds"] for each in passes) * texts


def _latency() -> Iterator[str]:
    """Whatever latencies `bench latency` has of each entrant, in ms."""
    name = newest("latency")
    values = []
    for row in load(name)["rows"]:
        entrant = str(row.get("entrant", row.get("path", row.get("name", ""))))
        for key, value in row.items():
            if isinstance(value, int | float) and ("p50" in key or "p99" in key):
                values.append(Bar(f"{entrant}: {key.replace('_', ' ')}", float(value), entrant.startswith("teimgr")))
    if values:
        yield bars("One short query", "ms", source(name), values, ".2f")


def _memory() -> Iterator[str]:
    name = newest("start")
    workers = load(name)["workers"]
    values = [Bar(worker["name"], worker["unique_mib"]) for worker in workers if worker.get("unique_mib")]
    if values:
        yield bars("Memory of each further worker of all-MiniLM-L6-v2 (USS)", "MiB", source(name), values)


def _growth() -> Iterator[str]:
    name = newest("growth")
    rows = load(name)["rows"]

    def points(what: str, value: str) -> Points:
        return [(row["n"], row[value]) for row in rows if row["what"] == what and row.get(value)]

    if texts := points("texts", "texts_per_s"):
        yield curves("A look-up table", ("texts of a call", "texts/s"), source(name), {"texts/s": texts})
    if lengths := points("tokens", "tokens_per_s"):
        yield curves("BERT of MiniLM's size", ("tokens of a text", "tokens/s"), source(name), {"tokens/s": lengths})
        times = {"one text, p50": points("tokens", "p50_ms")}
        yield curves("BERT of MiniLM's size", ("tokens of a text", "ms"), source(name), times)
    if instances := points("instances", "texts_per_s"):
        yield curves("MiniLM", ("instances", "texts/s of all"), source(name), {"texts/s": instances})
        shares = {"one query, p50": points("instances", "p50_ms"), "p99": points("instances", "p99_ms")}
        yield curves("MiniLM", ("instances", "ms"), source(name), shares)
        memory = {each: points("instances", each) for each in ("worker", "mux", "daemon")}
        yield curves("Memory (USS) of each process", ("instances", "MiB"), source(name), memory)
    added = [row for row in rows if row["what"].startswith("model: ") and row.get("worker")]
    if added:
        values = [Bar(row["what"].removeprefix("model: "), row["worker"]) for row in added]
        yield bars("Memory (USS) of the worker of each added model", "MiB", source(name), values)


_PLOTS: Mapping[str, tuple[Callable[[], Iterator[str]], ...]] = {
    "engine": (lambda: iter([PLOTS["engine"]()]),),
    "peers": (lambda: (PLOTS[f"peers-{texts}"]() for texts in ("mixed", "short", "long")),),
    "start": (lambda: iter([PLOTS["start"]()]), _memory),
    "mux": (lambda: iter([PLOTS["latency"]()]), _queries),
    "front": (_interfaces,),
    "bimodal": (_bimodal,),
    "servers": (_servers,),
    "latency": (_latency,),
    "growth": (_growth,),
}


def plots(scenario: str) -> Iterator[str]:
    """SVG documents of a scenario's newest result."""
    for make in _PLOTS.get(scenario, ()):
        yield from make()
