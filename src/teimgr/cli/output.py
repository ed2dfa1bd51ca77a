"""Tables on a terminal, tab-separated columns in a pipe, human-readable numbers and times."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from teimgr.observability.shown_text import one_line, several_lines

_COLOURS = {
    **{
        "running": "green",
        "starting": "yellow",
        "stopping": "yellow",
        "stopped": "dim",
        "unloaded": "dim",
        "failed": "bold red",
    },
    **{"carried over": "green", "same by default": "dim", "needs a decision": "bold yellow"},
    **{"cached": "green", "verified": "green", "ok": "green", "warn": "yellow", "fail": "bold red"},
}


def say(text: object = "", *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print what may hold words of callers, so without their control characters; line feeds stay."""
    print(several_lines(str(text)), end=end, file=file, flush=flush)


def field(text: object) -> str:
    """A value as a part of one line, without control characters and tabs."""
    return one_line(str(text)).replace("\t", " ")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, on_terminal: bool) -> None:
    """Rows under their headings on a terminal; in a pipe one line each, tabs between, without headings."""
    if not on_terminal:
        for row in rows:
            print("\t".join(map(_plain, row)))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*(column.upper() for column in columns), box=None, pad_edge=False, header_style="dim")
    for row in rows:
        table.add_row(*(Text(text, style=_COLOURS.get(text, "")) for text in map(_text, row)))
    Console().print(table)


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    return f"{cell:,.1f}" if isinstance(cell, float) else field(cell)


def _plain(cell: Any) -> str:
    """A cell for `awk`, which reads 1,242.1 as 1."""
    return f"{cell:.1f}" if isinstance(cell, float) else _text(cell)


@contextmanager
def spinner(text: str) -> Iterator[Any]:
    """A spinner on stderr where that is a terminal; yields a function that changes its text."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(field(text))) as status:
        yield lambda text: status.update(escape(field(text)))


def shortened(path: str, width: int) -> str:
    """A model's id or directory in at most `width` characters; its end, which tells models apart, stays."""
    if len(path) <= width:
        return path
    tail = path[-(width - 1) :]
    return "…" + (tail[tail.index("/") :] if "/" in tail else tail)


def duration(seconds: float | None) -> str:
    """A time span, such as 45 s, 3 m 20 s, 4 h 5 m, 12 d 3 h."""
    if seconds is None:
        return ""
    whole = int(seconds)
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{whole} s"


def size(count: float | None) -> str:
    """Bytes in binary units, such as 87 MiB."""
    if count is None:
        return ""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def leaves(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """The leaves of a JSON value with their paths, without empty ones."""
    if isinstance(value, Mapping) and value:
        return [leaf for key, each in value.items() for leaf in leaves(each, f"{prefix}.{key}" if prefix else key)]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [leaf for at, each in enumerate(value) for leaf in leaves(each, f"{prefix}[{at}]")]
    return [] if value is None or value in ([], {}) else [(prefix, value)]


def where(place: Mapping[str, Any]) -> str:
    """The host and device of a worker, by `node`, `gpu` and `gpu_id`."""
    device = "cpu" if place["gpu"] is None else f"gpu {place['gpu_id']}"
    return f"{place['node']} {device}" if place["node"] else device
