"""`bench html`: the newest result of every scenario as one self-contained page, with plots."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from html import escape

from docsite.plots import PLOTS, newest

from bench import SCENARIOS
from bench.report import RESULTS, machine_lines

_TARGET = RESULTS / "report.html"
_PLOTS = {
    "engine": ("engine",),
    "peers": ("peers-mixed", "peers-short", "peers-long"),
    "start": ("start",),
    "mux": ("latency",),
}
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;font-size:13px;margin:1rem 0}
td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}svg{max-width:46rem;width:100%;display:block;margin:1rem 0}
.n{color:#666;font-size:13px}section{overflow-x:auto}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#16181c}td,th{border-color:#333}.n{color:#aaa}}
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """No options: it measures nothing."""


def run(options: argparse.Namespace) -> int:
    """Write `results/report.html`."""
    found = [name for name in SCENARIOS if any(RESULTS.glob(f"{name}-20*.json"))]
    links = " · ".join(f'<a href="#{name}">{name}</a>' for name in found)
    sections = "\n".join(line for name in found for line in _section(name))
    page = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>teimgr measurements</title><style>{_STYLE}</style>
<h1>teimgr measurements</h1>
<p>The newest result of each scenario of <code>bench/</code>; each has its own date, machine and versions. Ratios are
paired: every path does one pass in each round, in turn. <code>bench/README.md</code> has how to read them.</p>
<p>{links}</p>
{sections}
</html>
"""
    _TARGET.write_text(page)
    print(f"written: bench/results/{_TARGET.name} with {', '.join(found)}")
    return 0


def _section(scenario: str) -> Iterator[str]:
    name = newest(scenario)
    document = json.loads((RESULTS / f"{name}.json").read_text())
    yield f'<section id="{scenario}"><h2>{scenario}: {escape(SCENARIOS[scenario])}</h2>'
    yield f'<p class="n">{document["date"]}, bench/results/{name}.json</p>'
    yield from (PLOTS[plot]() for plot in _PLOTS.get(scenario, ()))
    yield from _table((RESULTS / f"{name}.md").read_text())
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
