"""`bench html`: the newest result of every scenario as one self-contained page: targets, then tables and plots."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from html import escape
from statistics import median
from typing import Any

from docsite.plots import PLOTS, Bar, bars, curves, newest, source

from bench import SCENARIOS
from bench.report import RESULTS, machine_lines, markdown_table

_TARGET = RESULTS / "report.html"
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;font-size:13px;margin:1rem 0}
td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}svg{max-width:46rem;width:100%;display:block;margin:1rem 0}
.n{color:#666;font-size:13px}section{overflow-x:auto}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#16181c}td,th{border-color:#333}.n{color:#aaa}}
"""
# Results of further shapes of a scenario have names of their own.
# Figures of 534a7b9 on the machine of the targets, by which a target becomes a ratio that is the same everywhere.
_FORMER_RATES = {
    ("mux Embed", 256): (10_528, 12_000),
    ("/v1/embeddings", 64): (3_541, 8_000),
    ("/v1/embeddings", 256): (4_147, 8_000),
    ("/embed", 64): (7_040, 9_000),
    ("/embed", 256): (5_415, 9_000),
    ("EmbedArrow by the client", 1): (59_000, 150_000),
}
_FORMER_TIMES = {
    "queries back to back, p50 ms": (4.0, 2.1),
    "one query every 50 ms, p50 ms": (12.5, 3.0),
    "one query every 50 ms, p99 ms": (29.0, 5.0),
}
_FORMER_BULK = {"bulk, mixed texts": "1.35", "bulk, short texts": "1.35", "bulk, long texts": "1.5"}
_NAMES = SCENARIOS | {
    f"peers-{shape}": f"{SCENARIOS['peers']}, {name}"
    for shape, name in {
        "base": "BERT-base",
        "large": "BERT-large",
        "xlm-r-reranker": "a reranker of XLM-RoBERTa-base's shape",
        "splade": "SPLADE of BERT-base's shape",
        "modernbert": "ModernBERT-base",
        "qwen3": "Qwen3-Embedding-0.6B",
    }.items()
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """No options: it measures nothing."""


def run(options: argparse.Namespace) -> int:
    """Write `results/report.html`."""
    found = [name for name in _NAMES if any(RESULTS.glob(f"{name}-20*.json"))]
    documents = {name: json.loads((RESULTS / f"{newest(name)}.json").read_text()) for name in found}
    last = max(documents.values(), key=lambda document: str(document["date"]))
    links = " · ".join(f'<a href="#{name}">{name}</a>' for name in found)
    targets = markdown_table(
        ("figure", "measured", "asked"), [*_ratios(documents), *_since(documents), *_absolute(documents)]
    )
    sections = "\n".join(line for name in found for line in _section(name, documents[name]))
    head = "".join(f'<p class="n">{escape(line)}</p>' for line in machine_lines(last["machine"]))
    page = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>teimgr measurements</title><style>{_STYLE}</style>
<h1>teimgr measurements</h1>
<p>The newest result of each scenario of <code>bench/</code>; each has its own date, machine and versions. Ratios are
paired: every path does one pass in each round, in turn. <code>bench/README.md</code> has how to read them.</p>
<p>The newest is of {last["date"]}:</p>
{head}
{"".join(_table(targets))}
<p>{links}</p>
{sections}
</html>
"""
    _TARGET.write_text(page)
    print(f"written: bench/results/{_TARGET.name} with {', '.join(found)}")
    return 0


def _ratios(documents: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """What the results have of the ratios that were asked for."""
    for name in ("peers", "peers-base", "peers-large"):
        if name in documents:
            yield from _peer_ratios(name, documents[name]["rows"])
    if "engine" in documents:
        seconds = {row["path"]: row["seconds"] for row in documents["engine"]["rows"]}
        pairs = zip(seconds["teimgr engine, auto"], seconds["teimgr daemon, EmbedArrow"], strict=False)
        share = median(bare / served for bare, served in pairs)
        yield "EmbedArrow through the mux ÷ the bare engine", f"{share:.1%}", "98 %"
    if "neighbours" in documents:
        for row in documents["neighbours"]["rows"]:
            if row["checkout"] == "this" and "idle" in row["beside"]:
                yield "bulk beside an idle instance ÷ alone", f"{row['of_alone']:.1%}", "97 %"
    if "bimodal" in documents:
        row = documents["bimodal"]["rows"][0]
        yield "bulk lost beside 20 queries a second", f"{row['lost']:.1f} %", "5 % at most"
        yield "their p99 above 2 × idle, in tokens of bulk", f"{row['over_tokens']:,.0f}", "one batch"
    if "front" in documents:
        rates = {load: rate for (load, _), (rate, _) in _front(documents["front"]).items()}
        as_base64, as_arrow = rates.get("/v1/embeddings base64 × 64"), rates.get("mux EmbedArrow × 64")
        if as_base64 and as_arrow:
            yield "OpenAI base64 ÷ Arrow, batches of 64 texts, look-up table", f"{as_base64 / as_arrow:.0%}", "85 %"


def _since(documents: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Times as fast as the version that the targets were set for, in one run; asked is the target over its figure."""
    if "versions" in documents:
        for row in documents["versions"]["rows"]:
            former, target = _FORMER_TIMES.get(row["figure"], (0.0, 1.0))
            asked = f"{former / target:.2f}" if former else _FORMER_BULK.get(row["figure"], "")
            yield (
                f"{row['figure']}, × as fast as {documents['versions']['facts']['there']}",
                f"{row['times']:.2f}",
                asked,
            )
    if "front" in documents:
        passes = {(row["checkout"], row["load"], row["callers"]): row["passes"] for row in documents["front"]["rows"]}
        for (load, callers), (former, target) in _FORMER_RATES.items():
            here, there = (passes.get((checkout, load, callers), []) for checkout in ("here", "against"))
            pairs = zip(here, there, strict=False)
            times = [own["calls"] / own["seconds"] * other["seconds"] / other["calls"] for own, other in pairs]
            if times:
                name = (
                    f"look-up table, {load}, callers: {callers}, × as fast as {documents['front']['facts']['against']}"
                )
                yield name, f"{median(times):.2f}", f"{target / former:.2f}"


def _absolute(documents: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Times and rates that were asked for on two cores; those of another machine are not comparable."""
    if "mux" in documents:
        alone = next(row for row in documents["mux"]["rows"] if row["load"] == "one at a time, idle")
        yield "one query of MiniLM back to back through the mux, p50", f"{alone['p50']:.1f} ms", "2.1 ms"
    if "bimodal" in documents:
        row = documents["bimodal"]["rows"][0]
        for point, asked in (("p50", "3 ms"), ("p99", "5 ms")):
            yield f"one query every 50 ms through the mux, {point}", f"{row[f'idle_{point}_ms']:.1f} ms", asked
    if "front" in documents:
        found = _front(documents["front"])
        for load, callers, asked in (
            ("mux Embed", (256,), "12,000"),
            ("/v1/embeddings", (64, 256), "8,000, p99 60 ms"),
            ("/embed", (64, 256), "9,000, p99 60 ms"),
            ("EmbedArrow by the client", (1,), "150,000"),
        ):
            for count in (each for each in callers if (load, each) in found):
                rate, p99_ms = found[load, count]
                measured = f"{rate:,.0f}" + (f", p99 {p99_ms:.0f} ms" if p99_ms else "")
                what = "texts" if load.startswith("EmbedArrow") else "requests"
                yield f"look-up table, {load}, callers: {count}, {what} a second", measured, asked
    if "start" in documents:
        workers = documents["start"]["workers"][1:]  # the first waits for the fork server to import torch
        for key, what, asked in (
            ("running_s", "POST to running, MiniLM from the cache", "0.4 s"),
            ("restart_s", "restart of a killed worker", "0.5 s"),
            ("unique_mib", "memory of an added worker of MiniLM (USS)", "100 MB"),
        ):
            unit = "MiB" if key == "unique_mib" else "s"
            yield what, f"{median(each[key] for each in workers):.3g} {unit}", asked


def _front(document: dict[str, Any]) -> dict[tuple[str, int], tuple[float, float | None]]:
    """Load and callers → calls (of the client's bulk jobs texts) a second and p99 in ms, of this checkout's passes."""
    found = {}
    for row in (row for row in document["rows"] if row["checkout"] == "here"):
        p99s_ms = [each["p99_ms"] for each in row["passes"] if each.get("p99_ms")]
        rate = median(each["calls"] / each["seconds"] for each in row["passes"])
        found[row["load"], row["callers"]] = (rate, median(p99s_ms) if p99s_ms else None)
    return found


def _peer_ratios(name: str, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    model = {"peers": "MiniLM", "peers-base": "BERT-base", "peers-large": "BERT-large"}[name]
    for texts in dict.fromkeys(row["texts"] for row in rows):
        of = {row["path"]: row for row in rows if row["texts"] == texts}
        ours = of.get("teimgr engine, auto")
        in_bf16 = {"peers": "1.1", "peers-base": "1.2"}.get(name, "")
        for path, peer, asked in (
            ("teimgr engine, auto", "OpenVINO, bfloat16", in_bf16),
            ("teimgr engine, float32", "OpenVINO, float32", "1"),
            ("teimgr engine, float32", "ONNX Runtime, float32", "1"),
            ("teimgr engine, int8", "teimgr engine, auto", "1.4"),
        ):
            if path in of and peer in of:
                times = of[path]["tokens/s median"] / of[peer]["tokens/s median"]
                yield f"{model}, {texts} texts: {path} ÷ {peer}", f"{times:.2f}", asked
        if ours and ours.get("of limit"):
            asked = {"peers": "70 %", "peers-base": "80 %"}.get(name, "")
            yield f"{model}, {texts} texts: engine, auto ÷ matrix products alone", ours["of limit"], asked


def _interfaces() -> Iterator[str]:
    """Throughput against latency, a line for each interface with its callers."""
    name = newest("front")
    lines: dict[str, list[tuple[float, float]]] = {}
    for (load, _), (rate, p99_ms) in _front(json.loads((RESULTS / f"{name}.json").read_text())).items():
        if p99_ms:
            lines.setdefault(load, []).append((rate, p99_ms))
    several = {load: points for load, points in lines.items() if len(points) > 1}
    if several:
        yield curves("Interfaces around a look-up table", ("calls/s", "p99 in ms"), source(name), several)


def _load() -> Iterator[str]:
    """Latency of queries against how many are in flight."""
    name = newest("mux")
    rows = [row for row in json.loads((RESULTS / f"{name}.json").read_text())["rows"] if row["load"].endswith(", idle")]
    points = {
        point: [
            (1.0 if row["load"].startswith("one") else float(row["load"].split()[0]), row[point])
            for row in rows
            if row[point]
        ]
        for point in ("p50", "p99")
    }
    yield curves("Queries of MiniLM through the mux", ("calls in flight", "ms"), source(name), points)


def _bimodal() -> Iterator[str]:
    name = newest("bimodal")
    row = json.loads((RESULTS / f"{name}.json").read_text())["rows"][0]
    values = [
        Bar(f"{when}: {point}", row[f"{when}_{point}_ms"], when == "beside")
        for point in ("p50", "p99")
        for when in ("idle", "beside")
    ]
    yield bars("20 queries a second, idle and beside bulk", "ms", source(name), values, ".1f")


def _memory() -> Iterator[str]:
    name = newest("start")
    workers = json.loads((RESULTS / f"{name}.json").read_text())["workers"]
    values = [Bar(worker["name"], worker["unique_mib"]) for worker in workers if worker.get("unique_mib")]
    if values:
        yield bars("Memory of each further worker of all-MiniLM-L6-v2 (USS)", "MiB", source(name), values)


def _growth() -> Iterator[str]:
    name = newest("growth")
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]

    def points(what: str, value: str) -> list[tuple[float, float]]:
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


_PLOTS: dict[str, tuple[Callable[[], Iterator[str]], ...]] = {
    "engine": (lambda: iter([PLOTS["engine"]()]),),
    "peers": (lambda: (PLOTS[f"peers-{texts}"]() for texts in ("mixed", "short", "long")),),
    "start": (lambda: iter([PLOTS["start"]()]), _memory),
    "mux": (lambda: iter([PLOTS["latency"]()]), _load),
    "front": (_interfaces,),
    "bimodal": (_bimodal,),
    "growth": (_growth,),
}


def _section(scenario: str, document: dict[str, Any]) -> Iterator[str]:
    name = newest(scenario)
    yield f'<section id="{scenario}"><h2>{scenario}: {escape(_NAMES[scenario])}</h2>'
    yield f'<p class="n">{document["date"]}, bench/results/{name}.json</p>'
    yield from _table((RESULTS / f"{name}.md").read_text())
    for plots in _PLOTS.get(scenario, ()):
        yield from plots()
    facts = "".join(
        f"<li>{escape(key.replace('_', ' '))}: {escape(str(fact))}</li>" for key, fact in document["facts"].items()
    )
    yield f"<ul>{facts}</ul>"
    yield from (f'<p class="n">{escape(line)}</p>' for line in machine_lines(document["machine"]))
    yield "</section>"


def _table(markdown: str) -> Iterator[str]:
    """The tables of a Markdown result."""
    rows: list[list[str]] = []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            head, _, *body = rows
            yield "<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"
            yield from ("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
            yield "</table>"
            rows = []
