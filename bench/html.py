"""`bench html`: the newest result of every scenario as one self-contained page: targets, then tables and plots."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from docsite.plots import newest

from bench import SCENARIOS, absent_peers, compared, provenance
from bench.machine import instruction_set
from bench.provenance import Documents
from bench.reasons import reason
from bench.report import RESULTS, machine_lines
from bench.report_plots import plots
from bench.targets import AUTO, FLOAT32, INT8, MODELS, targets
from bench.verdicts import NOT_MEASURED, Line, Target

_TARGET = RESULTS / "report.html"
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:80rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;font-size:13px;margin:1rem 0}
td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:right;vertical-align:top}
td:first-child,th:first-child{text-align:left}svg{max-width:46rem;width:100%;display:block;margin:1rem 0}
.wide td,.wide th{text-align:left;min-width:6.5rem}.wide td:last-child{min-width:20rem}
.targets td:nth-last-child(4){min-width:19rem}.targets td:nth-last-child(5){min-width:11rem}
.targets td[rowspan]{font-weight:600;min-width:9rem;max-width:12rem}
.targets td[rowspan] .note{font-weight:400}
.note{color:#666;font-size:13px}section{overflow-x:auto}
.met{color:#18703a}.missed{color:#b02a1c;font-weight:600}
.wary{border:2px solid #d1783f;border-radius:4px;padding:.4rem 1rem;margin:1rem 0}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#16181c}td,th{border-color:#333}.note{color:#aaa}
a{color:#7fa4f0}.met{color:#6fce8f}.missed{color:#ff8b7b}}
"""
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
"""Scenarios by the name of their result: those of further shapes have names of their own."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """No options: it measures nothing."""


def run(options: argparse.Namespace) -> int:
    """Write `results/report.html`."""
    found = [name for name in _NAMES if any(RESULTS.glob(f"{name}-20*.json"))]
    documents = {name: _read(name) for name in found}
    whole = _read("all") if any(RESULTS.glob("all-20*.json")) else None
    _TARGET.write_text(page(documents, whole))
    print(f"written: bench/results/{_TARGET.name} with {', '.join(found)}")
    return 0


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{newest(name)}.json").read_text())
    return found


def page(documents: Documents, whole: Mapping[str, Any] | None) -> str:
    """The page of these results; `whole` is what `bench all` wrote of its newest run."""
    links = " · ".join(f'<a href="#{name}">{name}</a>' for name in documents)
    sections = "\n".join(line for name in documents for line in _section(name, documents[name]))
    answers = list(targets(documents))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>teimgr measurements</title><style>{_STYLE}</style>
<h1>teimgr measurements</h1>
<p>The newest result of each scenario of <code>bench/</code>; each has its own date, machine and versions below its
table. <code>python -m bench all</code> makes all of them and this page; <code>bench/README.md</code> has how to read
them.</p>
{"".join(_warnings(documents))}
{"".join(_head(documents, whole))}
<p><a href="#targets">targets</a> · <a href="#ratios">beside the fastest peers</a> · <a href="#absent">peers</a> ·
<a href="#texts">texts</a> · {links}</p>
<section id="targets"><h2>Targets</h2>
<p>{escape(_counts(answers))} Ratios are paired by round where the result has the seconds of every round: every path
does one pass in each round, in turn, and the median of the rounds' own ratios counts. Where it has not, they are ratios
of medians, and say so.</p>
{"".join(_answers(answers, documents))}</section>
<section id="ratios"><h2>Beside the fastest peers</h2>
<p>Each path of the engine against the fastest peer of the same precision in the same corpus, whichever it is; the
process of each has all cores.</p>
{"".join(_ratios(documents))}</section>
<section id="absent"><h2>Peers</h2>
{"".join(_peers(documents))}</section>
<section id="texts"><h2>Texts</h2>
{"".join(provenance.texts(documents))}</section>
{sections}
</html>
"""


def _warnings(documents: Documents) -> Iterator[str]:
    found = provenance.warnings(documents)
    if found:
        yield '<div class="wary"><b>To be wary of</b><ul>'
        yield from (f"<li>{_prose(warning)}</li>" for warning in found)
        yield "</ul></div>\n"


def _head(documents: Documents, whole: Mapping[str, Any] | None) -> Iterator[str]:
    yield '<table class="wide">'
    for name, text in (*provenance.head(documents), ("run", provenance.whole_run(whole))):
        yield f"<tr><td>{escape(name)}</td><td>{_prose(text)}</td></tr>"
    yield "</table>\n"


def _counts(answers: Sequence[Target]) -> str:
    """How many figures meet what was asked."""
    verdicts = [line.verdict for target in answers for line in target.lines]
    met, unmeasured = verdicts.count("met"), verdicts.count(NOT_MEASURED)
    missed = len([verdict for verdict in verdicts if "missed" in verdict])
    return f"{met} figures are met, {missed} are missed, {unmeasured} are not measured."


def _answers(answers: Sequence[Target], documents: Documents) -> Iterator[str]:
    yield '<table class="wide targets"><tr>'
    heads = ("target", "figure", "measured", "asked", "verdict", "why, where the time goes")
    yield from (f"<th>{name}</th>" for name in heads)
    yield "</tr>\n"
    for target in answers:
        told: set[str] = set()
        for at, line in enumerate(target.lines):
            first = ""
            if not at:
                first = f'<td rowspan="{len(target.lines)}">{escape(target.what)}<br><span class="note">'
                first += f"{escape(target.at_least)}</span></td>"
            yield f"<tr>{first}<td>{escape(line.figure)}</td><td>{_measured(line)}</td>"
            yield f"<td>{_unbroken(line.asked_text)}</td><td>{_verdict(line)}</td>"
            yield f"<td>{_why(line, documents, told)}</td></tr>\n"
    yield "</table>"


def _measured(line: Line) -> str:
    parts = []
    for value in line.values:
        label = f"{escape(value.label)}: " if len(line.values) > 1 else ""
        note = f' <span class="note">({escape(value.note)})</span>' if value.note else ""
        parts.append(f"{label}{_unbroken(line.form.text(value.measured))}{note}")
    return "<br>".join(parts) or "–"


def _verdict(line: Line) -> str:
    kind = {"met": "met", NOT_MEASURED: "note", "": "note"}.get(line.verdict, "missed")
    return f'<span class="{kind}">{_unbroken(line.verdict)}</span>'


def _prose(text: str) -> str:
    """HTML of a sentence with commands between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _unbroken(text: str) -> str:
    """Text with its units on the line of their numbers."""
    return escape(re.sub(r" (×|%|ms|s|MB)(?!\w)", "\u00a0\\1", text))


def _why(line: Line, documents: Documents, told: set[str]) -> str:
    """The reason of a miss, once for each target."""
    notes = "".join(_prose(note) + ". " for note in line.notes)
    if not line.values:
        return notes + _prose(line.unmeasured)
    if not line.misses:
        return notes
    if line.why in told:
        return f"{notes}as above"
    told.add(line.why)
    return notes + reason(line.why, documents)


def _ratios(documents: Documents) -> Iterator[str]:
    yield "<table><tr><th>model, texts</th><th>ours</th><th>precision</th><th>fastest peer</th><th>× as fast</th>"
    yield "<th>method</th><th>part of the matrix products alone</th></tr>"
    for name in (name for name in MODELS if name in documents):
        rows = documents[name]["rows"]
        for texts in compared.corpora(rows):
            for path in (FLOAT32, AUTO, INT8):
                own, found = compared.row(rows, texts, path), compared.of_best_peer(rows, texts, path)
                if own is None:
                    continue
                share = compared.of_limit(rows, texts, path)
                cells = (
                    f"{MODELS[name]}, {texts}",
                    path,
                    own["dtype"],
                    found.other if found else "none",
                    f"{found.times:.2f}" if found else "–",
                    found.method if found else "–",
                    "–" if share is None else f"{share:.0%}",
                )
                yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _peers(documents: Documents) -> Iterator[str]:
    yield '<table class="wide"><tr><th>peer</th><th>how</th><th>figures</th></tr>'
    for cells in absent_peers.status(documents):
        yield "<tr>" + "".join(f"<td>{_prose(cell)}</td>" for cell in cells) + "</tr>"
    yield "</table>"


def _section(scenario: str, document: dict[str, Any]) -> Iterator[str]:
    name = newest(scenario)
    yield f'<section id="{scenario}"><h2>{scenario}: {escape(_NAMES[scenario])}</h2>'
    commit = escape(provenance.commit(document))
    yield f'<p class="note">{document["date"]}, commit {commit}, bench/results/{name}.json</p>'
    yield from _table((RESULTS / f"{name}.md").read_text())
    yield from plots(scenario)
    for other in _elsewhere(scenario):
        found = json.loads((RESULTS / f"{other}.json").read_text())
        where = f"On {instruction_set(found['machine'])}: {found['date']}, commit {provenance.commit(found)}"
        yield f'<p class="note">{escape(where)}, bench/results/{other}.json</p>'
        yield from _table((RESULTS / f"{other}.md").read_text())
    facts = "".join(
        f"<li>{escape(key.replace('_', ' '))}: {escape(str(fact))}</li>" for key, fact in document["facts"].items()
    )
    yield f"<ul>{facts}</ul>"
    yield from (f'<p class="note">{escape(line)}</p>' for line in machine_lines(document["machine"]))
    yield "</section>"


def _elsewhere(scenario: str) -> list[str]:
    """The newest results of a scenario on machines of other instruction sets than that of the newest one."""
    of_sets: dict[str, str] = {}
    for name in sorted(path.stem for path in RESULTS.glob(f"{scenario}-20*.json")):
        of_sets[instruction_set(json.loads((RESULTS / f"{name}.json").read_text())["machine"])] = name
    return sorted(set(of_sets.values()) - {newest(scenario)})


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
