"""Plots of committed benchmark results as SVG: horizontal bars, without a library, legible in light and dark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

_RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
_WIDTH, _LABEL, _BAR, _GAP, _HEAD, _FOOT, _VALUE = 760, 300, 18, 10, 46, 30, 90
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.t{font-weight:600;font-size:15px}.n{font-size:11px;fill:#666}"
    ".o{fill:#7f8c9b}.b{fill:#3f6fd1}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.n{fill:#aaa}.b{fill:#7fa4f0}}"
)


class Bar(NamedTuple):
    """One value; `ours` distinguishes teimgr from what it is compared with by colour."""

    label: str
    value: float
    ours: bool = True


def newest(scenario: str) -> str:
    """The name, without its ending, of a scenario's newest result in bench/results."""
    return max(path.stem for path in _RESULTS.glob(f"{scenario}-20*.json"))


def load(name: str) -> dict[str, Any]:
    """A result file of bench/results, by its name without the ending."""
    found: dict[str, Any] = json.loads((_RESULTS / f"{name}.json").read_text())
    return found


def bars(title: str, unit: str, source: str, values: Sequence[Bar], number: str = ",.0f") -> str:
    """An SVG document of one bar a line; `source` is the result file, shown below with its machine."""
    most = max(bar.value for bar in values)
    height = _HEAD + len(values) * (_BAR + _GAP) + _FOOT
    room = _WIDTH - _LABEL - _VALUE
    described = "; ".join(f"{bar.label}: {bar.value:{number}} {unit}" for bar in values)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><desc>{escape(described)}</desc><style>{_STYLE}</style>",
        f'<text class="t" x="0" y="20">{escape(title)}, {escape(unit)}</text>',
    ]
    for index, bar in enumerate(values):
        y = _HEAD + index * (_BAR + _GAP)
        width = max(round(bar.value / most * room, 1), 1)
        lines += [
            f'<text x="{_LABEL - 10}" y="{y + 14}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect class="{"b" if bar.ours else "o"}" x="{_LABEL}" y="{y}" width="{width}" height="{_BAR}" rx="2"/>',
            f'<text x="{_LABEL + width + 8:g}" y="{y + 14}">{bar.value:{number}}</text>',
        ]
    lines.append(f'<text class="n" x="0" y="{height - 8}">{escape(source)}</text></svg>')
    return "\n".join(lines) + "\n"


def _path(row: Mapping[str, Any]) -> str:
    """The measured way with its type of numbers."""
    return row["path"] if row["dtype"] in row["path"] else f"{row['path']} ({row['dtype']})"


def _source(name: str) -> str:
    machine = load(name)["machine"]
    return f"bench/results/{name}.json: {machine['cores']} cores, {machine['cpu']}"


def engine() -> str:
    """Texts per second of the engine and through the daemon, beside sentence-transformers."""
    name = newest("engine")
    values = [
        Bar(_path(row), row["texts_per_s"]["median"], row["path"].startswith("teimgr")) for row in load(name)["rows"]
    ]
    return bars("all-MiniLM-L6-v2, 1,000 texts, median", "texts/s", _source(name), values)


def peers(texts: str) -> str:
    """Tokens per second in process beside OpenVINO and ONNX Runtime, for one set of texts."""
    name = newest("peers")
    values = [
        Bar(_path(row), row["tokens/s median"], row["path"].startswith("teimgr"))
        for row in load(name)["rows"]
        if row["texts"] == texts
    ]
    return bars(f"all-MiniLM-L6-v2, {texts} texts, median", "tokens/s", _source(name), values)


def start() -> str:
    """Seconds from create to running and from kill to running."""
    name = newest("start")
    values = []
    for worker in load(name)["workers"]:
        values += [
            Bar(f"{worker['name']}: create to running", worker["running_s"]),
            Bar(f"{worker['name']}: kill -9 to running", worker["restart_s"]),
        ]
    return bars("Starts and restarts of all-MiniLM-L6-v2", "s", _source(name), values, ".2f")


def latency() -> str:
    """Median and 99th percentile of a single query, idle and beside bulk."""
    name = newest("mux")
    values = [
        Bar(f"{row['load']}: {point}", row[point])
        for row in load(name)["rows"]
        if row["p50"] is not None
        for point in ("p50", "p99")
    ]
    return bars("Latency of one Embed over gRPC", "ms", _source(name), values, ".1f")


PLOTS: Mapping[str, Callable[[], str]] = {
    "engine": engine,
    "peers-mixed": partial(peers, "mixed"),
    "peers-short": partial(peers, "short"),
    "peers-long": partial(peers, "long"),
    "start": start,
    "latency": latency,
}
"""The plots by the name of their file."""
