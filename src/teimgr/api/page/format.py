"""Numbers, sizes and times as text: filters of the templates. `static/format.js` has the same for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SPARK_WIDTH, _SPARK_HEIGHT = 96, 24
_SPARK_MIN = 100.0
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


def tags(named: Mapping[str, str]) -> list[str]:
    """Tags such as team=search; one without a value is its name."""
    return [f"{name}={value}" if value else name for name, value in named.items()]


def spark(values: Sequence[float | None]) -> str:
    """The `points` of a polyline of the values, in a box of 96 by 24; empty for fewer than two.

    Below `_SPARK_MIN` the line stays low: the self-tests of an idle instance are not load.
    """
    known = [value or 0.0 for value in values]
    if len(known) < 2:
        return ""
    top = max(*known, _SPARK_MIN)
    step = _SPARK_WIDTH / (len(known) - 1)
    return " ".join(
        f"{index * step:.1f},{_SPARK_HEIGHT - 2 - value / top * (_SPARK_HEIGHT - 4):.1f}"
        for index, value in enumerate(known)
    )


FILTERS = {
    "size": size,
    "number": number,
    "ms": milliseconds,
    "duration": duration,
    "tags": tags,
    "spark": spark,
}
