"""Plots of committed benchmark results as SVG: bars and lines, without a library, legible in light and dark."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

_RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
_WIDTH, _LABEL, _BAR, _GAP, _HEAD, _FOOT, _VALUE = 760, 300, 18, 10, 46, 30, 90
_LETTER = 7.2  # wide at most, in the mean of a label
_LEFT, _CURVES_HEIGHT = 70, 300
_GRID = ".g{stroke:#8884;stroke-width:1}"
_COLOURS = ("#3f6fd1", "#d1783f", "#4a9a5a", "#b04a8f", "#8a7a2c", "#4a9aa8")
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
    label = max(_LABEL, round(max(len(bar.label) for bar in values) * _LETTER) + 10)
    room = _WIDTH - label - _VALUE
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
            f'<text x="{label - 10}" y="{y + 14}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect class="{"b" if bar.ours else "o"}" x="{label}" y="{y}" width="{width}" height="{_BAR}" rx="2"/>',
            f'<text x="{label + width + 8:g}" y="{y + 14}">{bar.value:{number}}</text>',
        ]
    lines.append(f'<text class="n" x="0" y="{height - 8}">{escape(source)}</text></svg>')
    return "\n".join(lines) + "\n"


def curves(title: str, axes: tuple[str, str], source: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """An SVG document of lines through points above 0, both axes logarithmic; `axes` are what x and y are."""
    points = [point for line in series.values() for point in line]
    places = [_scale([point[axis] for point in points]) for axis in (0, 1)]
    height = _HEAD + _CURVES_HEIGHT + 2 * _FOOT + 18 * len(series)
    width = _WIDTH - _LEFT - 20
    bottom = _HEAD + _CURVES_HEIGHT
    described = "; ".join(f"{name}: " + ", ".join(f"{x:.4g} {y:.4g}" for x, y in line) for name, line in series.items())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><desc>{escape(described)}</desc><style>{_STYLE}{_GRID}</style>",
        f'<text class="t" x="0" y="20">{escape(title)}: {escape(axes[1])} by {escape(axes[0])}</text>',
    ]
    for tick, part in places[0][1]:
        x = _LEFT + part * width
        lines.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD}" y2="{bottom}"/>')
        lines.append(f'<text class="n" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:,g}</text>')
    for tick, part in places[1][1]:
        y = bottom - part * _CURVES_HEIGHT
        lines.append(f'<line class="g" x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="n" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:,g}</text>')
    for index, (name, line) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        dash = ' stroke-dasharray="5 4"' if index >= len(_COLOURS) else ""
        drawn = [(_LEFT + places[0][0](x) * width, bottom - places[1][0](y) * _CURVES_HEIGHT) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in drawn]
        y = bottom + _FOOT + 18 * index + 8
        lines.append(f'<line x1="0" x2="24" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="3"{dash}/>')
        lines.append(f'<text x="32" y="{y}">{escape(name)}</text>')
    lines.append(f'<text class="n" x="0" y="{height - 8}">{escape(source)}</text></svg>')
    return "\n".join(lines) + "\n"


def _scale(values: Sequence[float]) -> tuple[Callable[[float], float], list[tuple[float, float]]]:
    """Where a value lies between 0 and 1, logarithmic, and ticks with their places."""
    low, high = math.log10(min(values)), math.log10(max(values))
    if high - low < 0.3:
        low, high = low - 0.15, high + 0.15

    def place(value: float) -> float:
        return (math.log10(value) - low) / (high - low)

    steps = (1,) if high - low > 3 else (1, 2, 5)
    every = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return place, [(tick, place(tick)) for tick in every if -0.001 <= place(tick) <= 1.001]


def _path(row: Mapping[str, Any]) -> str:
    """The measured way with its type of numbers."""
    return row["path"] if row["dtype"] in row["path"] else f"{row['path']} ({row['dtype']})"


def source(name: str) -> str:
    """The line below a plot: the result file and its machine."""
    machine = load(name)["machine"]
    return f"bench/results/{name}.json: {machine['cores']} cores, {machine['cpu']}"


def engine() -> str:
    """Texts per second of the engine and through the daemon, beside sentence-transformers."""
    name = newest("engine")
    values = [
        Bar(_path(row), row["texts_per_s"]["median"], row["path"].startswith("teimgr")) for row in load(name)["rows"]
    ]
    count, _, _ = load(name)["facts"]["texts"].partition(" ")
    return bars(f"all-MiniLM-L6-v2, {int(count):,} texts, median", "texts/s", source(name), values)


def peers(*names: str) -> str:
    """Tokens per second in process beside OpenVINO and ONNX Runtime, for the first of these texts that there are."""
    name = newest("peers")
    rows = load(name)["rows"]
    texts = next(each for each in names if any(row["texts"] == each for row in rows))
    values = [
        Bar(_path(row), row["tokens/s median"], row["path"].startswith("teimgr"))
        for row in rows
        if row["texts"] == texts
    ]
    return bars(f"all-MiniLM-L6-v2, {texts} texts, median", "tokens/s", source(name), values)


def start() -> str:
    """Seconds from create to running and from kill to running."""
    name = newest("start")
    values = []
    for worker in load(name)["workers"]:
        values += [
            Bar(f"{worker['name']}: create to running", worker["running_s"]),
            Bar(f"{worker['name']}: kill -9 to running", worker["restart_s"]),
        ]
    return bars("Starts and restarts of all-MiniLM-L6-v2", "s", source(name), values, ".2f")


def latency() -> str:
    """Median and 99th percentile of a single query, idle and beside bulk."""
    name = newest("mux")
    values = [
        Bar(f"{row['load']}: {point}", row[point])
        for row in load(name)["rows"]
        if row["p50"] is not None
        for point in ("p50", "p99")
    ]
    return bars("Latency of one Embed over gRPC", "ms", source(name), values, ".1f")


PLOTS: Mapping[str, Callable[[], str]] = {
    "engine": engine,
    "peers-mixed": partial(peers, "mixed"),
    "peers-short": partial(peers, "short"),
    "peers-long": partial(peers, "all-256", "long"),
    "start": start,
    "latency": latency,
}
"""The plots by the name of their file."""
