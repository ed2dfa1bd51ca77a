"""Numbers, sizes and times as text: filters of the templates. `static/format.js` has the same for scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from teimgr.http.docs_page import prose

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SPARK_WIDTH, _SPARK_HEIGHT = 96, 24
_SPARK_MIN = 100.0  # self-tests of an idle fleet are not load
SPARK_POINTS = 20
"""Those of five minutes at the pace of an hour's chart."""
NOTHING = "–"
SCALE_END_MS = 248_000  # where the buckets of durations end, less the rounding


def size(count: float | None) -> str:
    """Bytes such as 1.5 GiB."""
    if count is None:
        return NOTHING
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} {_UNITS[power]}" if count >= 100 or not power else f"{count:.1f} {_UNITS[power]}"


def number(value: float | None) -> str:
    """At most four characters and a unit: 0, 7.4, 312, 12.3k, 4.1M."""
    if value is None:
        return NOTHING
    for limit, divisor, unit in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (float("inf"), 1e9, "G")):
        if abs(value) < limit:
            short = value / divisor
            return f"{short:.0f}{unit}" if short >= 100 or short == round(short) else f"{short:.1f}{unit}"
    return NOTHING


def milliseconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    if value >= SCALE_END_MS:
        return f"> {value / 1000:.0f} s"
    if value >= 1000:
        return f"{value / 1000:.1f} s"
    return f"{value:.0f} ms" if value >= 10 or not value else f"{value:.1f} ms"


def duration(seconds: float | None) -> str:
    """The two greatest units: 3 d 4 h, 5 min 12 s, 8 s."""
    if seconds is None:
        return NOTHING
    parts: list[str] = []
    rest = int(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def evidence(figures: Mapping[str, float | str]) -> list[str]:
    """Figures such as `held 39.9 MiB`, each with the unit that its name ends in."""
    return [_figure(name, value) for name, value in figures.items()]


def _figure(name: str, value: float | str) -> str:
    word, _, unit = name.replace("_", " ").rpartition(" ")
    if not isinstance(value, str):
        if unit == "bytes":
            return f"{word} {size(value)}"
        if unit == "s":
            return f"{word} {duration(value)}"
        if unit == "share":
            return f"{word} {100 * value:.0f} %"
    return f"{name.replace('_', ' ')} {f'{value:.4g}' if isinstance(value, float) else value}"


def tags(named: Mapping[str, str]) -> list[str]:
    """Tags such as team=search; one without a value is its name."""
    return [f"{name}={value}" if value else name for name, value in named.items()]


def clock(moment: float | None) -> str:
    """A Unix time such as 14:03:22 UTC; empty for None."""
    return "" if moment is None else f"{datetime.fromtimestamp(moment, UTC):%H:%M:%S} UTC"


def scale_end(greatest: float) -> float:
    """Where a scale from 0 that holds the value ends: 1, 2 or 5 times a power of ten, and at least `_SPARK_MIN`."""
    power = 10.0 ** math.floor(math.log10(max(greatest, _SPARK_MIN)))
    return next(end for end in (power, 2 * power, 5 * power, 10 * power) if end >= greatest)


def spark(values: Sequence[float | None], top: float) -> str:
    """The path of a line through the values, in a box of 96 by 24 that ends at `top`; a gap where one is missing.

    The last value is at the right, and the box has room for `SPARK_POINTS`: lines beside each other show equal times.
    """
    step, first = _SPARK_WIDTH / (SPARK_POINTS - 1), SPARK_POINTS - len(values)
    path, move = [], "M"
    for index, value in enumerate(values, first):
        if value is None:
            move = "M"
            continue
        path.append(f"{move}{index * step:.1f},{_SPARK_HEIGHT - 2 - min(value / top, 1) * (_SPARK_HEIGHT - 4):.1f}")
        move = "L"
    return "".join(path)


FILTERS = {
    "size": size,
    "evidence": evidence,
    "number": number,
    "ms": milliseconds,
    "duration": duration,
    "tags": tags,
    "clock": clock,
    "spark": spark,
    "prose": prose,
}
